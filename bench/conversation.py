"""A conversation of screenshots, as an agent has it: each turn sends all turns before it again, over HTTP.

A turn is a picture (by default of 1,000 tokens where the model allows that), a short question and an answer of
`--tokens`. Servers start as in bench.compare, with their reuse of prompts and pictures left on. Of each turn: prompt
tokens that were computed and not found in a cache, pictures encoded, seconds until the first token. A turn's own tokens
begin where its prompt differs from the last prompt and the computed tokens of its answer, and for the engine with the
block that this is in. Tokens of both that differ are rewritten, by the chat template or by the tokenizer. Measured
alone in the same engine after each conversation: one encode of such a picture, and one prefill of another last turn,
whose prefix and features are cached. Answers are digits, because other tokens of random weights are no
text that becomes the same tokens again. The last line of the output is one JSON document.

    python -m bench.conversation --model qwen2.5-vl-3b --quantization int4 --threads 2 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import re
import statistics
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from bench.compare import add_options, parse_options, run, run_all
from bench.micro.encode import picture_of
from bench.micro.subject import directory_of
from bench.peers.table import sections
from hydra_engine.models.specs.registry import load_spec
from hydra_terminal.load.client import Answer, Client
from hydra_terminal.load.events import parse as parse_events
from hydra_terminal.load.pictures import jpeg
from hydra_terminal.load.target import ServerFailed, Target

GOALS = {"over_alone": 1.1, "over_first": 1.2}  # of the last turn's time to first token, at most
_QUESTION = "Where is the button to press next?"
_ASPECT = (40, 25)  # of a screenshot
_PICTURE_TOKENS = 1000
_TEMPLATE = {"enable_thinking": False}
_BIAS = 1000  # more than random weights with tied embeddings make of a logit
_REPORT_S = 1.0  # an instance reports its counters within it
_HEAD = (
    *("system", "turn", "prompt tokens", "rewritten", "own", "computed", "pictures encoded"),
    *("first token s", "over encode + prefill alone", "over turn 1"),
)

Message = dict[str, Any]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "hydra-engine,llama.cpp")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--picture", help=f"width x height of a screenshot (default: one of {_PICTURE_TOKENS} tokens)")
    parser.add_argument("--alone", type=int, default=3, help="encodes and prefills alone; medians are shown")
    parser.add_argument("--context", type=int, default=16_384, help="most tokens of a prompt with its answer")
    parser.add_argument("--kv-cache-gib", type=int, default=4, help="of the systems that take it")
    arguments = parse_options(parser, words)
    arguments.picture = picture_of(arguments) if arguments.picture else screenshot(arguments.model)
    return arguments


def screenshot(model: str) -> tuple[int, int]:
    """Width and height of a picture of 1,000 tokens; of the size for Qwen2.5-VL where the model has none."""
    vision = load_spec(directory_of(model)).vision
    if vision is None:
        raise SystemExit(f"--model: {model} takes no pictures")
    sizes = [(_ASPECT[0] * side, _ASPECT[1] * side) for side in range(8, 65)]
    fitting = [size for size in sizes if vision.plan_image(*size).num_tokens == _PICTURE_TOKENS]
    return fitting[0] if fitting else (_ASPECT[0] * 28, _ASPECT[1] * 28)


# ---- requests


class Talk:
    """A conversation with one server. `digits`: the token of each digit."""

    def __init__(self, target: Target, arguments: argparse.Namespace, digits: dict[str, int]) -> None:
        self._target, self._arguments, self._digits = target, arguments, digits
        self._is_ours = target.dialect == "hydra"
        info = json.loads(_call(target, "/server_info")) if self._is_ours else None
        self._block = info["instances"][0]["kv_cache"]["block_size"] if info else 1
        self.messages: list[Message] = []
        self._sequence: list[int] = []  # the last prompt with its answer
        self._length = 0  # of it

    def turn(self, seed: int) -> dict[str, Any]:
        """Asks about the next screenshot, and keeps the answer."""
        self.messages.append(self._question(seed))
        figures, text = self._ask(self.messages)
        known = max(self._length - 1, 0)  # nobody has computed the last token of an answer
        rewritten = None
        if self._is_ours:
            prompt = self._prompt()
            same = min(known, _num_alike(self._sequence, prompt))
            known, rewritten = same, known - same
            self._sequence = prompt + [self._digits[digit] for digit in text]
        self.messages.append({"role": "assistant", "content": text})
        self._length = figures["prompt_tokens"] + figures["answer_tokens"]
        own = figures["prompt_tokens"] - known // self._block * self._block
        return figures | {"own_tokens": own, "rewritten_tokens": rewritten}

    def _prompt(self) -> list[int]:
        """Token ids of the messages. Asked for after the turn, as it opens the pictures."""
        body = {"model": self._target.model, "messages": self.messages, "chat_template_kwargs": _TEMPLATE}
        tokens: list[int] = json.loads(_call(self._target, "/tokenize", body))["tokens"]
        return tokens

    def alone(self, seed: int) -> dict[str, Any]:
        """Measures one encode, and one prefill of another last turn. Keeps neither in the conversation."""
        question = self._question(seed)
        encode, _ = self._ask([question])
        prefill, _ = self._ask([*self.messages[:-2], question])
        return {
            "encode_s": encode["encode_s"],
            "encoded": encode["encoded"],
            "prefill_s": prefill["prefill_s"],
            "prefill_tokens": prefill["computed_tokens"],
            "encoded_again": prefill["encoded"],
        }

    def _question(self, seed: int) -> Message:
        url = "data:image/jpeg;base64," + base64.b64encode(jpeg(*self._arguments.picture, seed)).decode()
        return {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": _QUESTION}],
        }

    def _ask(self, messages: Sequence[Message]) -> tuple[dict[str, Any], str]:
        """(figures of the request, its answer). Raises ServerFailed."""
        body = {
            "model": self._target.model,
            "messages": messages,
            "max_tokens": self._arguments.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "chat_template_kwargs": _TEMPLATE,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._is_ours:
            body |= {"return_metrics": True, "allowed_token_ids": list(self._digits.values())}
        else:
            body["logit_bias"] = {str(token): _BIAS for token in self._digits.values()}
        answer = asyncio.run(_send(self._target, json.dumps(body).encode()))
        stream = parse_events(answer.chunks)
        if (problem := answer.error or stream.error) or not stream.stamps or stream.usage is None:
            raise ServerFailed(f"{self._target.name} fails a request: {problem or 'its stream has no tokens or usage'}")
        usage, metrics = stream.usage, stream.metrics or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        pictures = sum(message["role"] == "user" for message in messages)
        figures = {
            "prompt_tokens": usage["prompt_tokens"],
            "answer_tokens": usage["completion_tokens"],
            "computed_tokens": None if cached is None else usage["prompt_tokens"] - cached,
            "encoded": pictures - metrics["cached_images"] if metrics else None,
            "ttft_s": round(stream.stamps[0] - answer.sent_s, 5),
            **{name: round(metrics[name], 5) for name in ("encode_s", "prefill_s") if metrics},
        }
        return figures, stream.text


def _num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens with which both begin."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


async def _send(target: Target, body: bytes) -> Answer:
    answer = Answer(0.0)
    async with Client(target) as client:
        await client.send(body, answer)
    return answer


def _call(target: Target, path: str, document: dict[str, Any] | None = None) -> str:
    data = None if document is None else json.dumps(document).encode()
    headers = {"Content-Type": "application/json", **target.headers}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(target.base_url + path, data, headers), timeout=30
        ) as answer:
            return str(answer.read().decode())
    except OSError as error:
        raise ServerFailed(f"{target.name} does not answer {path}: {error}") from error


def digit_tokens(target: Target) -> dict[str, int]:
    """The token of each digit, which answers consist of."""
    tokens = {}
    for digit in "0123456789":
        words = {"content": digit} if target.dialect == "openai" else {"prompt": digit, "add_special_tokens": False}
        tokens[digit] = json.loads(_call(target, "/tokenize", words | {"model": target.model}))["tokens"][-1]
    return tokens


def num_encoded(target: Target) -> int | None:
    """Pictures that went through the engine's towers since it started; None of a peer."""
    if target.dialect != "hydra":
        return None
    time.sleep(_REPORT_S)
    found = re.findall(r"^hydra:images_encoded_total\{.*?\} (\S+)$", _call(target, "/metrics"), re.MULTILINE)
    return int(sum(float(value) for value in found))


def measure(target: Target, arguments: argparse.Namespace, number: int) -> dict[str, Any]:
    digits, turns = digit_tokens(target), arguments.turns
    warm_up = Talk(target, arguments, digits)
    for seed in range(2):
        warm_up.turn(1_000_000 + seed)
    talk, before = Talk(target, arguments, digits), num_encoded(target)
    document: dict[str, Any] = {"turns": [talk.turn(1000 * number + turn) for turn in range(turns)]}
    if before is not None:
        document["encoded"] = (num_encoded(target) or 0) - before
        document["alone"] = [talk.alone(1000 * number + turns + again) for again in range(arguments.alone)]
    return document


# ---- the table


def table(documents: Sequence[dict[str, Any]], cpu: str, flags: frozenset[str]) -> Iterator[str]:
    """Medians of the rounds."""
    for heading, systems in sections(documents, cpu, flags):
        yield heading
        yield _line(*_HEAD)
        yield _line(*["---"] * len(_HEAD))
        for name, rounds in systems.items():
            yield from _turns(name, rounds) if rounds else [_line(name, "left out", *[""] * (len(_HEAD) - 2))]
    goals = f"{GOALS['over_alone']} times encode and prefill alone, {GOALS['over_first']} times turn 1"
    yield f"\nGoals of the last turn: its own tokens computed, one picture encoded; {goals}."


def _turns(name: str, rounds: Sequence[dict[str, Any]]) -> Iterator[str]:
    last = len(rounds[0]["turns"]) - 1
    first_s = _median([one["turns"][0]["ttft_s"] for one in rounds])
    for turn in range(last + 1):
        each = [one["turns"][turn] for one in rounds]
        ttft_s = _median([one["ttft_s"] for one in each])
        alone = [each for one in rounds for each in one.get("alone", ())] if turn == last else []
        counts = ("prompt_tokens", "rewritten_tokens", "own_tokens", "computed_tokens", "encoded")
        yield _line(
            *(name, str(turn + 1)),
            *(_count([one[key] for one in each]) for key in counts),
            f"{ttft_s:.3f}",
            _over_alone(ttft_s, alone) if alone else "",
            f"{ttft_s / first_s:.2f}",
        )


def _over_alone(ttft_s: float, alone: Sequence[dict[str, Any]]) -> str:
    encode_s, prefill_s = (_median([one[key] for one in alone]) for key in ("encode_s", "prefill_s"))
    return f"{ttft_s / (encode_s + prefill_s):.2f} of {encode_s:.3f} + {prefill_s:.3f} s"


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _count(values: Sequence[int | None]) -> str:
    """A count that is the same in all rounds, or its bounds; nothing where the system does not say it."""
    known = sorted({value for value in values if value is not None})
    return "" if not known else str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    arguments = parse()
    settings = {"requests": 1, "context": arguments.context, "kv_gib": arguments.kv_cache_gib, "reuses": True}
    facts = {"turns": arguments.turns, "picture": arguments.picture, "goals": GOALS}
    run("conversation", run_all(arguments, measure, settings), table, **facts)


if __name__ == "__main__":
    main()

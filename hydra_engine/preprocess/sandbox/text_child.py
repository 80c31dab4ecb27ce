"""The text child: `python -m hydra_engine.preprocess.sandbox.text_child FD SETUP` renders and tokenises prompts.

Templates and tokenizers are programs by the model's author. They can harm this process only: loading them and each
prompt have limits of CPU time and memory, and reaching one ends the process or the prompt. Prompts come as JSON, with
media reduced to their positions.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

import msgspec

from hydra_engine.core.call import ChatMessage, ImagePart, MediaPart, Role, TextPart, ToolCall, VideoPart
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.errors import CheckpointError, ErrorInfo, InvalidRequest
from hydra_engine.models.specs.base import ItemPlan, MediaPlan
from hydra_engine.preprocess.sandbox.child_loop import Memory, limit_memory_beyond, serve
from hydra_engine.preprocess.text.tokenizer import TokenizerParts, load_tokenizer
from hydra_engine.preprocess.text.writer import Prompt, TextSpec, Writer

_MEDIA = {"image": ImagePart, "video": VideoPart}
_SPAN = ItemPlan(0, 0, 0, 0, 0, (0, 0, 0))


def as_json(value: Any) -> bytes:
    """Encodes plain JSON, tuples and mappings of all kinds; keeps lone surrogates."""
    return json.dumps(value, default=dict).encode()


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """The fields from which `prompt_of` makes the same prompt, without media."""
    return {
        "messages": [_message_fields(message) for message in prompt.messages],
        "template": option_fields(prompt.template),
        **{name: getattr(prompt, name) for name in ("text", "num_chars", "add_special_tokens", "param")},
    }


def prompt_of(*, messages: Sequence[Any], template: Mapping[str, Any], **fields: Any) -> Prompt:
    messages = tuple(_message_of(**message) for message in messages)
    return Prompt([], messages, template=TemplateOptions(**template), **fields)


def option_fields(options: TemplateOptions) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in fields(options)}


def plan_fields(plans: Sequence[MediaPlan]) -> list[list[str | None]]:
    """Lists of texts, with None for each span."""
    return [[part if isinstance(part, str) else None for part in plan.parts] for plan in plans]


def plans_of(fields: Sequence[Sequence[str | None]]) -> list[MediaPlan]:
    return [MediaPlan((), tuple(_SPAN if part is None else part for part in parts)) for parts in fields]


def _message_fields(message: ChatMessage) -> dict[str, Any]:
    content = message.content
    return {
        "role": message.role,
        "content": content if isinstance(content, str) else [_part_fields(part) for part in content],
        "param": message.param,
        "calls": [(call.name, call.arguments, call.id) for call in message.tool_calls],
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "others": message.others,
    }


def _part_fields(part: TextPart | MediaPart) -> tuple[str, str]:
    return ("text", part.text) if isinstance(part, TextPart) else (part.kind, part.param)


def _message_of(*, content: Any, calls: Sequence[Any], **fields: Any) -> ChatMessage:
    return ChatMessage(
        content=content if isinstance(content, str) else tuple(_part_of(*part) for part in content),
        tool_calls=tuple(ToolCall(name, arguments, id, "tool_calls") for name, arguments, id in calls),
        **fields,
    )


def _part_of(kind: str, value: str) -> TextPart | MediaPart:
    return TextPart(value) if kind == "text" else _MEDIA[kind](None, value)


LOAD_CPU_SECONDS = 30.0  # for the tokenizer; 150,000 tokens take one or two
PROBE_CPU_SECONDS = 5.0  # for some short conversations
CPU_SECONDS = 2.0  # per prompt; ordinary ones take milliseconds
CPU_SECONDS_PER_CHAR = 2e-5  # in addition; tokenising takes a tenth of it
MEMORY_BYTES = 768 << 20  # of address space, in addition to the interpreter's
MAX_TOKEN_CHARS = 4096  # of a token of the vocabulary: streams decode it on the event loop
MAX_PROBE_CHARS = 1 << 20  # of a rendered short conversation

_SAMPLE = (
    "Hello, world! 1234567890 aaaa    \t\n\n(){}[] don't \u00e9\u4e2d\u6587\u0e01\U0001f600 https://a.example/b?c=d "
    * 4
)


Method = Literal["encode", "place", "parts", "generation_prompt", "tokenizer"]


class Setup(msgspec.Struct):
    """The child's argument, as JSON."""

    model_dir: str
    spec: TextSpec
    chat_template_path: str | None = None


class Job(msgspec.Struct):
    """A call of a `Writer` method; `arguments` as JSON."""

    method: Method
    arguments: bytes
    num_chars: int


class Written(msgspec.Struct):
    """The result of a method: token ids (uint32), a text or the tokenizer. `error`: the fault of the request.
    `exhausted`: the memory limit was reached."""

    ids: list[bytes] = []
    text: str = ""
    tokenizer: TokenizerParts | None = None
    error: ErrorInfo | None = None
    exhausted: bool = False


def cpu_seconds(num_chars: int) -> float:
    """The limit of one job, in seconds of CPU time."""
    return CPU_SECONDS + num_chars * CPU_SECONDS_PER_CHAR


def main() -> None:
    serve(msgspec.msgpack.Decoder(Job), start, lambda job: cpu_seconds(job.num_chars))


def start() -> Callable[[Job, Memory], Written]:
    setup = msgspec.json.decode(sys.argv[2], type=Setup)
    import jinja2.sandbox  # noqa: F401 - what is imported does not count as the model's
    import transformers.utils.chat_template_utils  # noqa: F401

    limit_memory_beyond(MEMORY_BYTES)
    try:
        signal.setitimer(signal.ITIMER_PROF, LOAD_CPU_SECONDS)
        tokenizer = load_tokenizer(setup.model_dir, setup.spec.tokenizer_class)
        tokenizer.check_lengths(MAX_TOKEN_CHARS)
        writer = Writer(tokenizer, setup.spec, setup.chat_template_path)
        signal.setitimer(signal.ITIMER_PROF, PROBE_CPU_SECONDS)
        _probe(writer)
    except MemoryError:
        raise too_much() from None
    time.localtime()  # reads the time zone file while files can be opened
    signal.setitimer(signal.ITIMER_PROF, 0.0)

    def answer(job: Job, _memory: Memory) -> Written:
        try:
            if job.method == "tokenizer":
                return Written(tokenizer=tokenizer.parts())
            result = _METHODS[job.method](writer, *json.loads(job.arguments))
        except InvalidRequest as error:
            return Written(error=error.info())
        except MemoryError:
            return Written(exhausted=True)
        if isinstance(result, str):
            return Written(text=result)
        return Written([array("I", ids).tobytes() for ids in result])

    return answer


def _encode(writer: Writer, prompt: Any) -> list[list[int]]:
    return [writer.encode(prompt_of(**prompt))]


def _place(writer: Writer, prompt: Any, plans: Any) -> list[list[int]]:
    return [writer.encode_with_media(prompt_of(**prompt), plans_of(plans))]


def _generation_prompt(writer: Writer, options: Any, role: Role) -> str:
    return writer.generation_prompt(TemplateOptions(**options), role)


_METHODS: dict[Method, Callable[..., str | list[list[int]]]] = {
    "encode": _encode,
    "place": _place,
    "parts": Writer.parts,
    "generation_prompt": _generation_prompt,
}


def too_much() -> CheckpointError:
    return CheckpointError(
        "the model's tokenizer or its chat template takes more time or memory for a short conversation than any needs; "
        "take them from another copy of the model, or give another template with --chat-template FILE"
    )


def _probe(writer: Writer) -> None:
    """Tries short conversations and a text, so that a model that never works is found before requests come."""
    for prompt in _prompts():
        try:
            writer.encode(prompt)
        except InvalidRequest:  # a template may refuse any of them
            continue
        if len(prompt.text) > MAX_PROBE_CHARS:
            raise CheckpointError(
                f"the model's chat template makes {len(prompt.text)} characters of a short conversation; give another "
                "one with --chat-template FILE"
            )
    for role in ("user", "tool"):
        writer.generation_prompt(TemplateOptions(), "tool" if role == "tool" else "user")
    writer.parts([_SAMPLE, "x" * 64, " " * 64])


def _prompts() -> Iterator[Prompt]:
    tool = {"type": "function", "function": {"name": "probe", "description": "x", "parameters": {"type": "object"}}}
    call = ToolCall("probe", {"x": 1}, "call00001", "tool_calls")
    user = ChatMessage("user", "Hello, who are you?", "messages[0]")
    turns = (
        ChatMessage("system", "Be brief.", "messages[0]"),
        user,
        ChatMessage("assistant", "Nobody.", "messages[2]"),
    )
    called: tuple[ChatMessage, ...] = (user, ChatMessage("assistant", "", "messages[1]", (call,)))
    called = (*called, ChatMessage("tool", "2", "messages[2]", tool_call_id="call00001", name="probe"))
    for options in (TemplateOptions(), TemplateOptions(tools=(tool,)), TemplateOptions(add_generation_prompt=False)):
        for messages in ((user,), (*turns, user), called):
            yield Prompt([], messages, template=options)
    yield Prompt([], text=_SAMPLE, add_special_tokens=True)


if __name__ == "__main__":
    main()

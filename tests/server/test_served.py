"""The whole thing as a person starts it: `hydra-engine serve demo` in a process, real HTTP, real answers."""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.faults.server import COMMAND

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "hydra_engine" / "demo"
QUESTIONS = json.loads((DEMO / "questions.json").read_text(encoding="utf-8"))


_FINISHED = "vllm:request_success_total{"


class Served:
    """A server process and its `url`."""

    def __init__(
        self, *arguments: str, command: Sequence[str] = COMMAND, environment: Mapping[str, str] | None = None
    ) -> None:
        command = [*command, *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        assert self.process.stderr is not None
        self.log: list[str] = []
        for line in self.process.stderr:
            self.log.append(line)
            if line.startswith("ready on "):
                self.url = line.split()[-1]
                break
        else:
            raise AssertionError("".join(self.log))
        # Somebody must read on, or a full pipe would stop the server.
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr or []), daemon=True)
        self._reader.start()

    @property
    def num_finished(self) -> int:
        """Requests that ended on this server, for whatever reason, by its own count."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as response:
            page = response.read().decode()
        return sum(int(float(line.split()[-1])) for line in page.splitlines() if line.startswith(_FINISHED))

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return json.loads(response.read() or b"null")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(40)
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served("--enable-log-requests")
    yield server
    # Whichever tests have run here, at least this request has.
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        question: Any = [{"role": "user", "content": "What is two plus three?"}]
        answer = client.chat.completions.create(model="demo", messages=question, temperature=0)
    assert answer.choices[0].message.content == "Two plus three is five."
    num_finished = server.num_finished
    server.end()
    # One line a request, with sizes and times and without what was said.
    lines = [line for line in server.log if "hydra_engine.requests" in line]
    assert len(lines) == num_finished >= 1 and all("prompt tokens" in line for line in lines)
    assert sum(answer.id in line for line in lines) == 1
    assert not any("two plus three" in line.lower() for line in server.log)
    assert server.process.returncode == 0


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def content_of(question: dict[str, Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": question["question"]}]
    if question["picture"]:
        data = base64.b64encode((DEMO / question["picture"]).read_bytes()).decode()
        parts.insert(0, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
    return parts


PARROT = "ab\N{PARROT}c"  # of a parrot each byte is a token


@pytest.mark.parametrize("stop", [None, "c", "\N{PARROT}c", "bx"])
def test_streamed_log_probabilities_are_those_of_the_whole_answer(client: openai.OpenAI, stop: str | None) -> None:
    """Token by token, also where text is held back: for a stop string, or until a character is whole."""
    question: Any = [{"role": "user", "content": "a"}]
    asked: Any = {"model": "demo", "temperature": 0, "stop": stop, "extra_body": {"guided_choice": [PARROT]}}
    whole = client.chat.completions.create(messages=question, logprobs=True, top_logprobs=3, **asked)
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    streamed: list[Any] = []
    text = ""
    for chunk in client.chat.completions.create(messages=question, logprobs=True, top_logprobs=3, stream=True, **asked):
        text += chunk.choices[0].delta.content or ""
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == whole.choices[0].logprobs.content and text == whole.choices[0].message.content
    assert text == PARROT.partition(stop)[0] if stop else text == PARROT
    assert len(streamed) >= 5


@pytest.mark.parametrize("stop", [None, "c", "\N{PARROT}c"])
def test_streamed_token_ids_are_those_of_the_whole_answer(client: openai.OpenAI, stop: str | None) -> None:
    fields = {"guided_choice": [PARROT], "return_token_ids": True}
    asked: Any = {"model": "demo", "prompt": "a", "temperature": 0, "stop": stop, "logprobs": 2, "extra_body": fields}
    [whole] = client.completions.create(**asked).to_dict()["choices"]  # type: ignore[misc]
    chunks = [chunk.to_dict()["choices"][0] for chunk in client.completions.create(stream=True, **asked)]  # type: ignore[index]
    ids = [token for chunk in chunks for token in chunk.get("token_ids") or ()]
    logprobs = [one for chunk in chunks for one in (chunk.get("logprobs") or {}).get("token_logprobs", ())]
    assert ids == list(whole["token_ids"]) and logprobs == whole["logprobs"]["token_logprobs"]
    assert len(ids) == len(logprobs) >= 5


def at_rest(served: Served) -> None:
    deadline = time.monotonic() + 10
    while True:
        report = served.get("/debug/ledger")
        if report.get("at_rest"):
            return
        assert time.monotonic() < deadline, report
        time.sleep(0.05)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q["question"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_right_answers(client: openai.OpenAI, question: dict[str, Any], stream: bool) -> None:
    messages: Any = [{"role": "user", "content": content_of(question)}]
    if stream:
        chunks = client.chat.completions.create(model="demo", messages=messages, temperature=0, stream=True)
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
    else:
        answer = client.chat.completions.create(model="demo", messages=messages, temperature=0)
        assert answer.choices[0].finish_reason == "stop"
        text = answer.choices[0].message.content or ""
    assert text == question["answer"]


def test_completions_and_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list().data] == ["demo"]
    completion = client.completions.create(model="demo", prompt="What is", max_tokens=5, temperature=0)
    assert completion.usage is not None and completion.usage.completion_tokens <= 5


@pytest.mark.quick("Describe")
@pytest.mark.parametrize("question", QUESTIONS[:3], ids=lambda q: q["question"])
def test_right_answers_of_the_other_endpoints(served: Served, client: openai.OpenAI, question: dict[str, Any]) -> None:
    """The same question in OpenAI's newer form and in Anthropic's, whole and streamed."""
    parts: list[Any] = [{"type": "input_text", "text": question["question"]}]
    blocks: list[Any] = [{"type": "text", "text": question["question"]}]
    if question["picture"]:
        data = base64.b64encode((DEMO / question["picture"]).read_bytes()).decode()
        parts.insert(0, {"type": "input_image", "image_url": f"data:image/png;base64,{data}", "detail": "auto"})
        lines = base64.encodebytes((DEMO / question["picture"]).read_bytes()).decode()  # of 76 characters
        source = {"type": "base64", "media_type": "image/png", "data": lines}
        blocks.insert(0, {"type": "image", "source": source})
    asked: Any = {"model": "demo", "input": [{"role": "user", "content": parts}], "temperature": 0}
    answer = client.responses.create(**asked)
    assert (answer.output_text, answer.status) == (question["answer"], "completed")
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_text == question["answer"]
    turn: Any = {"model": "demo", "messages": [{"role": "user", "content": blocks}]}
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as other:
        count = other.messages.count_tokens(**turn).input_tokens
        for sequences, text, reason in (
            ([], question["answer"], "end_turn"),
            (["."], question["answer"].partition(".")[0], "stop_sequence"),
        ):
            options: Any = {"max_tokens": 100, "extra_body": {"temperature": 0}, "stop_sequences": sequences}
            message = other.messages.create(**turn, **options)
            with other.messages.stream(**turn, **options) as events:
                streamed = events.get_final_message()
            for one in (message, streamed):
                assert (one.content[0].text, one.stop_reason) == (text, reason)
                assert one.usage.input_tokens + (one.usage.cache_read_input_tokens or 0) == count


def test_calls_through_all_endpoints(served: Served, client: openai.OpenAI) -> None:
    """The demo was not trained to call anything, so calls that must come: the same arguments everywhere."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 3}},
        "required": ["city", "days"],
    }
    question: Any = [{"role": "user", "content": "What is two plus three?"}]
    function: Any = {"name": "weather", "parameters": schema}
    chat = client.chat.completions.create(
        model="demo",
        messages=question,
        temperature=0,
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    expected = json.loads((chat.choices[0].message.tool_calls or [])[0].function.arguments)
    assert expected.keys() == {"city", "days"}
    asked: Any = {"model": "demo", "input": question, "temperature": 0, "tools": [{"type": "function", **function}]}
    named: Any = {"type": "function", "name": "weather"}
    with client.responses.stream(**asked, tool_choice=named) as stream:
        streamed = stream.get_final_response()
    for response in (client.responses.create(**asked, tool_choice=named), streamed):
        [call] = response.output
        assert (call.name, json.loads(call.arguments), call.status) == ("weather", expected, "completed")
    [call] = client.responses.create(**asked, tool_choice="required", parallel_tool_calls=False).output
    assert call.name == "weather" and json.loads(call.arguments).keys() == expected.keys()
    turn: Any = {"model": "demo", "messages": question, "max_tokens": 400, "extra_body": {"temperature": 0}}
    turn["tools"] = [{"name": "weather", "input_schema": schema}]
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as other:
        for choice in ({"type": "tool", "name": "weather"}, {"type": "any", "disable_parallel_tool_use": True}):
            with other.messages.stream(**turn, tool_choice=choice) as events:
                last = events.get_final_message()
            for message in (other.messages.create(**turn, tool_choice=choice), last):
                [block] = message.content
                assert (block.type, block.name, message.stop_reason) == ("tool_use", "weather", "tool_use")
                assert block.input == expected or choice["type"] == "any"


def test_tokens_as_the_vocabulary_spells_them(served: Served) -> None:
    body = json.dumps({"prompt": "two plus", "return_token_strs": True}).encode()
    request = urllib.request.Request(served.url + "/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        found = json.loads(response.read())
    vocabulary = json.loads((DEMO / "model" / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    assert [vocabulary[text] for text in found["token_strs"]] == found["tokens"] and found["count"] > 1


def test_texts_may_hold_a_nul_character(served: Served, client: openai.OpenAI) -> None:
    """Prompts, stop strings and forms of the answer may hold it, and so may their texts."""
    answer = client.completions.create(model="demo", prompt="One\0 two", max_tokens=3, echo=True, temperature=0)
    assert answer.choices[0].text.startswith("One\0 two")
    messages: Any = [{"role": "user", "content": "What is\0 two\0 plus three?"}]
    forced: Any = {"structured_outputs": {"choice": ["a\0b\0c"]}}
    chat = client.chat.completions.create(model="demo", messages=messages, extra_body=forced)
    assert chat.choices[0].message.content == "a\0b\0c"
    chat = client.chat.completions.create(model="demo", messages=messages, stop=["b\0"], extra_body=forced)
    assert chat.choices[0].message.content == "a\0"
    with pytest.raises(openai.BadRequestError, match="NUL"):
        client.completions.create(model="demo", prompt="a", extra_body={"cache_salt": "\0"})
    url = "file:///a\0b"
    pictures: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="demo", messages=pictures)


def test_a_request_is_ended_by_its_id(served: Served, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Hello"}],
        stream=True,
        max_tokens=1500,
        extra_body={"ignore_eos": True},
    )
    first = next(iter(stream))
    request = urllib.request.Request(f"{served.url}/v1/requests/{first.id}", method="DELETE")
    with urllib.request.urlopen(request, timeout=30) as response:
        assert json.loads(response.read())["ended"] == 1
    with pytest.raises(openai.APIError, match="was ended by its id"):
        list(stream)
    at_rest(served)


def test_what_the_server_says_of_itself(served: Served) -> None:
    info = served.get("/server_info")
    [instance] = info["instances"]
    assert (info["model"], info["topology"], instance["device"]) == ("demo", "EPD", "cpu")
    assert instance["kv_cache"]["num_blocks"] > 0 and instance["image_cache"]["bytes"] > 0
    assert str(ROOT) not in json.dumps(info)
    assert served.get("/load") == {"server_load": 0}
    assert "/v1/messages" in served.get("/openapi.json")["paths"]


def test_errors_reach_the_client_as_its_own_classes(client: openai.OpenAI) -> None:
    broken: Any = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": broken}])
    assert caught.value.code in ("image_decode_failed", "unsupported_image_format")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    private: Any = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": private}])
    assert caught.value.code == "media_url_forbidden"
    local: Any = [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": local}])


def test_a_client_that_leaves_frees_everything(served: Served, client: openai.OpenAI) -> None:
    for read in (0, 3):
        stream = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Hello"}],
            stream=True,
            max_tokens=1500,
            extra_body={"ignore_eos": True},
        )
        for _ in zip(range(read), stream, strict=False):
            pass
        stream.close()
        at_rest(served)


def said_by(script: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run in this process, which has read what scripts import. Like a process that ends, it closes what they left."""
    file = folder / "pasted.py"
    file.write_text(script, encoding="utf-8")
    capsys.readouterr()
    with contextlib.chdir(ROOT), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        runpy.run_path(str(file), run_name="__main__")
        gc.collect()
    return capsys.readouterr().out


def test_the_readme_commands_work_as_pasted(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [b for b in re.findall(r"```sh\n(.*?)```", readme, re.DOTALL) if "curl" in b]
    blocks = [b.replace("http://127.0.0.1:8000", served.url) for b in blocks]
    outputs = [subprocess.run(["bash", "-c", b], capture_output=True, text=True, cwd=ROOT, timeout=60) for b in blocks]
    assert len(outputs) == 2 and all(o.returncode == 0 for o in outputs)
    assert json.loads(outputs[0].stdout)["choices"][0]["message"]["content"] == "Two plus three is five."
    assert outputs[1].stdout.rstrip().endswith("data: [DONE]")
    scripts = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(scripts) == 1
    for script in scripts:
        said = said_by(script.replace("http://127.0.0.1:8000", served.url), tmp_path, capsys)
        assert "There" in said or "star" in said


@pytest.mark.slow
def test_the_quick_start_works_as_pasted(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8").replace("http://127.0.0.1:8000", served.url)
    program = tmp_path / "hydra-engine"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hydra_engine "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    blocks = [
        ["bash", "-c", b] for b in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "hydra-engine serve" not in b
    ]
    outputs = []
    for block in blocks:
        done = subprocess.run(block, capture_output=True, text=True, cwd=ROOT, timeout=120, env=environment)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    scripts = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ran, asked, chatted, chosen, generated, memory, planned = outputs
    streamed, message = (said_by(script, tmp_path, capsys) for script in scripts)
    assert json.loads(asked)["choices"][0]["message"]["content"] == "Two plus three is five."
    assert json.loads(chosen)["choices"][0]["message"]["content"] == "Two plus three is five."
    assert ran.strip() == chatted.strip() == message.strip() == "Two plus three is five."
    assert generated.startswith("There is a blue triangle") and "prefill" in generated
    assert streamed.strip() == "There are two red objects." and "epd0" in memory and "pd0" in planned


@pytest.mark.slow
def test_the_blocks_of_the_api_document_work_as_pasted(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").replace("http://127.0.0.1:8000", served.url)
    (shell,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert json.loads(done.stdout)["metrics"]["slo"]["ttft_limit_s"] == 0.5
    said = [said_by(script, tmp_path, capsys).strip() for script in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    assert said[:3] == ["Two plus three is five."] * 3 and "gaps late" in said[3] and len(said) == 4


def test_sigterm_lets_a_stream_finish_and_exits_zero() -> None:
    served = Served()
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Hello"}],
            stream=True,
            max_tokens=400,
            extra_body={"ignore_eos": True},
        )
        chunks = [next(iter(stream))]
        served.process.send_signal(signal.SIGTERM)
        with pytest.raises((urllib.error.HTTPError, urllib.error.URLError)):
            for _ in range(200):
                served.get("/health")
                time.sleep(0.01)
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
    assert served.process.wait(40) == 0
    served.end()


@pytest.mark.slow  # tests/server/test_runner.py sends one to a scripted engine's server
def test_a_second_signal_ends_at_once() -> None:
    served = Served()
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Hello"}],
            stream=True,
            max_tokens=1900,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        served.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(30) != 0
        stream.close()
    served.end()


def run_serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.faults.server", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("demo", "--port", "{taken}"), 4, "cannot listen"),
        (("{empty}", "--port", "0"), 3, "config.json"),
        (("demo", "--port", "0", "--device", "cuda:63"), 5, "cuda:63 cannot be used"),
        (("demo", "--port", "0", "--topology", "E+X"), 2, "topology"),
        pytest.param(("demo", "--port", "0", "--num-kv-blocks", "1"), 4, "KV", marks=pytest.mark.slow),
    ],
)
def test_start_faults_are_one_sentence_and_an_exit_code(
    served: Served, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    port = served.url.rsplit(":", 1)[1]
    done = run_serve(*(one.format(taken=port, empty=tmp_path) for one in arguments))
    assert done.returncode == code, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("hydra-engine: ") and words in last, last
    assert "Traceback" not in done.stderr

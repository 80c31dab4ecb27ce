"""`--record-workload`: the file from its opening to the end of the server, and what is in it of real requests."""

from __future__ import annotations

import base64
import errno
import json
import logging
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from hydra_engine.config import ServerConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.outputs import FinishReason, RequestMetrics, Result, Usage
from hydra_engine.errors import ConfigError
from hydra_engine.preprocess.preprocessor import CallFacts
from hydra_engine.server import runner
from hydra_planner.workload import recording
from hydra_planner.workload.file import Picture, WorkloadRequest, read_workload, request_line
from hydra_planner.workload.recording import WorkloadFile
from tests.frontend.rig import make_request
from tests.server.stub import StubEngine
from tests.server.test_served import DEMO, Served

ROW = WorkloadRequest(at_s=1.0, prompt_tokens=8, output_tokens=4)
LINE = request_line(ROW)


def test_lines_can_be_read_as_soon_as_they_are_written_and_by_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    file = WorkloadFile(path)
    assert path.stat().st_mode & 0o777 == 0o600
    file.add(LINE)
    deadline = time.monotonic() + 10
    while path.read_bytes().count(b"\n") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert read_workload(path) == (ROW,)
    file.add(LINE)
    file.close()
    assert read_workload(path) == (ROW, ROW)


def test_a_file_that_is_there_is_kept_and_one_without_requests_is_not(tmp_path: Path) -> None:
    path, old = tmp_path / "load.jsonl", tmp_path / "load.jsonl.old"
    path.write_text("something that took long to make" + " and longer" * 20)
    WorkloadFile(path).close()
    assert old.read_text().startswith("something")
    WorkloadFile(path).close()
    assert old.read_text().startswith("something"), "a recording without a request takes its place from nothing"
    file = WorkloadFile(path)
    file.add(LINE)
    file.close()
    WorkloadFile(path).close()
    assert read_workload(old) == (ROW,)


@pytest.mark.parametrize(
    ("name", "reason"), [("no/folder", "No such file or directory"), (".", "Is a directory"), ("/dev/full", "No space")]
)
def test_a_file_that_cannot_be_written_ends_the_start(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^record_workload cannot be written: {reason}.*; name a file") as refused:
        WorkloadFile(tmp_path / name)
    assert refused.value.param == "record_workload"


def test_a_disk_that_fills_up_is_told_once_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "load.jsonl"
    file = WorkloadFile(path)
    room = 2 * len(LINE)  # for one line and a part of the next

    def write(descriptor: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = data[:room]
        room -= len(part)
        return real(descriptor, part)

    real = os.write
    monkeypatch.setattr(recording.os, "write", write)
    with caplog.at_level(logging.WARNING, recording.logger.name):
        for _ in range(5):
            file.add(LINE)
        file.close()
    monkeypatch.undo()
    assert [record.getMessage() for record in caplog.records] == [
        "the workload is recorded no longer: No space left on device; what was written before is whole"
    ]
    assert path.read_bytes().endswith(b"\n") and read_workload(path) == (ROW,)


def test_a_disk_that_is_too_slow_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording, "MAX_WAITING", 1)
    monkeypatch.setattr(WorkloadFile, "_write_all", lambda self: time.sleep(0))  # its thread does nothing
    monkeypatch.setattr(recording, "_LAST_LINES_S", 0.01)
    file = WorkloadFile(tmp_path / "load.jsonl")
    with caplog.at_level(logging.WARNING, recording.logger.name):
        for _ in range(3):
            file.add(LINE)
        file.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the workload is recorded no longer: the disk is too slow; what was written before is whole"
    ]
    os.close(file._file)


async def test_the_server_stops_with_one_sentence_before_the_model_is_loaded(tmp_path: Path) -> None:
    ended = []

    async def start() -> None:
        raise AssertionError("the model is loaded")

    async def stop() -> None:
        ended.append(True)

    config = ServerConfig(port=0, record_workload=str(tmp_path / "no" / "load.jsonl"))
    with pytest.raises(ConfigError, match="record_workload cannot be written"):
        await runner.serve(StubEngine(), config, start=start, stop=stop)
    assert ended


async def test_what_the_engine_writes_until_it_is_closed_is_in_the_file(tmp_path: Path) -> None:
    path, observers = tmp_path / "load.jsonl", []
    engine: Any = StubEngine()
    engine.frontend = SimpleNamespace(observers=observers, oldest_arrival_s=0.0)
    request = replace(make_request(1), arrival_s=time.monotonic() + 60.0)
    active = SimpleNamespace(request=request, facts=CallFacts(RequestId(1), 8, ()))

    async def start() -> None:
        pass

    async def stop() -> None:
        (observe,) = observers
        observe(active, Result("req-1", "", (1, 2), FinishReason.ABORT, Usage(8, 4), RequestMetrics()))

    config = ServerConfig(port=0, record_workload=str(path))
    ended = await runner.serve(
        engine, config, start=start, stop=stop, ready=lambda _: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert ended == 0
    (row,) = read_workload(path)
    assert (row.prompt_tokens, row.output_tokens) == (8, 4) and 0 < row.at_s <= 60.0


async def test_a_server_without_what_records_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing() -> None:
        pass

    monkeypatch.setattr(runner, "load_entry_points", lambda group: {})
    with pytest.raises(ConfigError, match="not in this installation"):
        await runner.serve(
            StubEngine(), ServerConfig(port=0, record_workload=str(tmp_path / "x")), start=nothing, stop=nothing
        )


@pytest.mark.slow
def test_a_real_server_records_what_it_was_asked(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    server = Served("--record-workload", str(path))
    try:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            counts = _ask(client)
    finally:
        server.end()
    text = path.read_text()
    assert not any(word in text for word in ("plus", "shapes", "user", "data:", "secret"))
    assert json.loads(text.splitlines()[0])["source"] == "recorded"
    found = read_workload(path)
    assert len(found) == 5, "the refused ones are absent"
    one, first, second, several, cut = found
    pictures = (Picture(336, 336, 0),)
    assert not one.pictures and (one.prompt_tokens, one.output_tokens) == counts["text"]
    assert first.pictures == second.pictures == pictures
    assert first.prompt_tokens < counts["picture"][0], "without what the picture becomes"
    assert (first.prompt_tokens, first.output_tokens) == (second.prompt_tokens, counts["picture"][1])
    assert several.output_tokens == 6, "of three answers the longest"
    assert 1 <= cut.output_tokens < 200, "what was generated until it was cut off"


def _ask(client: openai.OpenAI) -> dict[str, tuple[int, int]]:
    """Sends one after the other, so that their order is known: text, a picture twice, what is refused, three
    answers, and one that is cancelled early."""
    words: Any = [{"role": "user", "content": "What is two plus three?"}]
    data = base64.b64encode((DEMO / "pictures" / "shapes.png").read_bytes()).decode()
    shown: Any = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    seen: Any = [{"role": "user", "content": [shown, {"type": "text", "text": "How many shapes?"}]}]
    text = client.chat.completions.create(model="demo", messages=words, temperature=0, max_tokens=6)
    picture = client.chat.completions.create(model="demo", messages=seen, temperature=0, max_tokens=5)
    client.chat.completions.create(model="demo", messages=seen, temperature=0, max_tokens=5)
    broken: Any = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}
    ]
    for messages, most in ((broken, 5), (words, 100_000)):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="demo", messages=messages, max_tokens=most)
    options: Any = {"extra_body": {"ignore_eos": True}, "temperature": 0}
    client.chat.completions.create(model="demo", messages=words, n=3, max_tokens=6, **options)
    stream = client.chat.completions.create(model="demo", messages=words, stream=True, max_tokens=200, **options)
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    stream.close()
    assert text.usage is not None and picture.usage is not None
    return {
        "text": (text.usage.prompt_tokens, text.usage.completion_tokens),
        "picture": (picture.usage.prompt_tokens, picture.usage.completion_tokens),
    }

"""`hydra-engine serve demo` with two instances, over HTTP: what clients see when instances or the server die or end."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_served import QUESTIONS, Served, at_rest, content_of

TOKENS = 300


@dataclass
class Stream:
    """A client of a streamed chat that reads in its own thread."""

    text: str = ""
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    done: bool = False  # [DONE] was the last event
    events: list[str] = field(default_factory=list)
    thread: threading.Thread | None = None

    def start(self, url: str, body: dict[str, Any]) -> Stream:
        self.thread = threading.Thread(target=self._read, args=(url, body))
        self.thread.start()
        return self

    def _read(self, url: str, body: dict[str, Any]) -> None:
        data = json.dumps({"model": "demo", "temperature": 0, "stream": True, **body}).encode()
        request = urllib.request.Request(url + "/v1/chat/completions", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                for line in response:
                    if line.startswith(b"data: "):
                        self._take(line[6:].decode().strip())
        except OSError as error:  # the server has gone
            self.events.append(repr(error))

    def _take(self, event: str) -> None:
        self.events.append(event)
        self.done = event == "[DONE]"
        if self.done:
            return
        chunk = json.loads(event)
        if "error" in chunk:
            self.error = chunk["error"]
            return
        for choice in chunk["choices"]:
            self.text += choice["delta"].get("content") or ""
            self.finish_reason = choice["finish_reason"] or self.finish_reason

    def ended(self) -> Stream:
        assert self.thread is not None
        self.thread.join(60)
        assert not self.thread.is_alive(), "the stream hangs"
        return self


def long_chat(index: int = 0, max_tokens: int = TOKENS) -> dict[str, Any]:
    question = QUESTIONS[index % len(QUESTIONS)]
    messages = [{"role": "user", "content": content_of(question)}]
    return {"messages": messages, "max_tokens": max_tokens, "ignore_eos": True}


def wait_for(condition: Any, what: str, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {within_s} s: {what}"
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    """Process ids of the living instances of server `pid`, the one started first in front."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = status.read_text().rsplit(")", 1)[1].split()
            is_instance = b"hydra_engine.cluster.process" in (status.parent / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if is_instance and words[0] not in "ZX" and int(words[1]) == pid:
            found.append((int(words[19]), int(status.parent.name)))
    return [number for _, number in sorted(found)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def health_of(server: Served) -> dict[str, Any]:
    """Health of a server, also of one that cannot serve at the moment."""
    try:
        found: dict[str, Any] = server.get("/health")
    except urllib.error.HTTPError as error:
        with error:
            found = json.loads(error.read())
    return found


pytestmark = pytest.mark.usefixtures("started_in_full")


def shared_names() -> set[str]:
    return set(os.listdir("/dev/shm"))


def start(*arguments: str) -> Served:
    return Served("--topology", "EP+D", "--block-size", "8", "--recovery-s", "30", *arguments)


def started(*arguments: str) -> Iterator[Served]:
    server = start(*arguments)
    yield server
    server.end()


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Served]]:
    """Servers, one after the other; only the last may live."""
    found: list[Served] = []
    yield found
    for server in found:
        server.end()


@pytest.fixture
def served(servers: list[Served]) -> Served:
    """A live server, started by an earlier test or now. A test may end it."""
    if not servers or servers[-1].process.poll() is not None:
        servers.append(start())
    return servers[-1]


@pytest.fixture
def impatient() -> Iterator[Served]:
    yield from started("--recovery-s", "0.2")


@pytest.mark.slow
def test_pictures_are_seen_and_health_names_the_instances(served: Served) -> None:
    health = health_of(served)
    assert [(one["name"], one["role"], one["condition"]) for one in health["instances"]] == [
        ("ep0", "EP", "ready"),
        ("d0", "D", "ready"),
    ]
    assert health["degraded"] is False
    for question in QUESTIONS:
        body = {"messages": [{"role": "user", "content": content_of(question)}]}
        stream = Stream().start(served.url, body).ended()
        assert (stream.text, stream.error, stream.done) == (question["answer"], None, True)
    at_rest(served)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [pytest.param(0, id="ep0"), pytest.param(1, id="d0", marks=pytest.mark.slow)])
def test_a_stream_goes_on_where_it_was_when_its_instance_is_killed(served: Served, victim: int) -> None:
    expected = [Stream().start(served.url, long_chat(index)).ended() for index in range(2)]
    assert all(stream.finish_reason == "length" and stream.done for stream in expected)
    restarts = [one["restarts"] for one in health_of(served)["instances"]]
    order = sorted(range(2), key=lambda i: restarts[i])  # who died was started later; before that, as in the topology
    streams = [Stream().start(served.url, long_chat(index)) for index in range(2)]
    wait_for(lambda: all(stream.text for stream in streams), "both streams run")
    os.kill(children_of(served.process.pid)[order.index(victim)], signal.SIGKILL)
    for stream, right in zip(streams, expected, strict=True):
        stream.ended()
        assert (stream.text, stream.finish_reason, stream.error, stream.done) == (right.text, "length", None, True)
    wait_for(lambda: not health_of(served)["degraded"], "all instances are back")
    at_rest(served)
    assert health_of(served)["instances"][victim]["restarts"] == restarts[victim] + 1


@pytest.mark.slow
def test_without_recovery_clients_are_told_and_a_killed_server_leaves_nothing(impatient: Served) -> None:
    names = shared_names()
    stream = Stream().start(impatient.url, long_chat(max_tokens=1500))
    wait_for(lambda: stream.text, "the stream runs")
    os.kill(children_of(impatient.process.pid)[1], signal.SIGKILL)
    stream.ended()
    assert stream.error is not None and stream.error["code"] == "instance_lost" and not stream.done
    assert json.loads(stream.events[-1]) == {"error": stream.error}
    wait_for(lambda: len(children_of(impatient.process.pid)) == 2, "the instance is started again")
    pids = children_of(impatient.process.pid)
    streams = [Stream().start(impatient.url, long_chat(index)) for index in range(4)]
    time.sleep(0.2)
    impatient.process.kill()
    impatient.process.wait()
    wait_for(lambda: not any(map(alive, pids)), "its instances end", within_s=30.0)
    assert not any(stream.ended().done for stream in streams)
    assert shared_names() <= names


@pytest.mark.slow
def test_a_second_sigterm_ends_at_once(served: Served) -> None:
    pids = children_of(served.process.pid)
    stream = Stream().start(served.url, long_chat(max_tokens=1900))
    wait_for(lambda: stream.text, "the stream runs")
    served.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(30) != 0
    assert not stream.ended().done
    assert not any(map(alive, pids))


@pytest.mark.slow
def test_sigterm_lets_everything_finish_that_moves_between_instances(served: Served) -> None:
    expected = [Stream().start(served.url, long_chat(index)).ended() for index in range(6)]
    pids = children_of(served.process.pid)
    assert len(pids) == 2
    streams = [Stream().start(served.url, long_chat(index)) for index in range(6)]
    wait_for(lambda: all(stream.events for stream in streams), "all streams run")
    assert not all(stream.done for stream in streams)
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(40) == 0
    assert [(s.ended().text, s.error, s.done) for s in streams] == [(right.text, None, True) for right in expected]
    assert not any(map(alive, pids))

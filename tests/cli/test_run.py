"""`run` as a person has it on a terminal and in pipes, and what is left behind when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hydra_terminal.run import sort_words
from tests.campaigns.siege import processes
from tests.campaigns.siege.processes import descendants
from tests.cli.conftest import ROOT, Here
from tests.cli.terminal import Terminal

RUN = [sys.executable, "-m", "hydra_engine", "run"]
PICTURE = "hydra_engine/demo/pictures/stars.png"
PROMPT = "/quit leaves.\n> "
GONE_S = 20.0


@pytest.mark.parametrize(
    ("words", "pictures", "videos", "question"),
    [
        (["-"], [], [], None),
        (["no-such.png", "What is it?"], ["no-such.png"], [], "What is it?"),
        (["how", "many", PICTURE], [PICTURE], [], "how many"),
        (["https://a.example/cat", "file:///clip.mp4"], ["https://a.example/cat"], ["file:///clip.mp4"], None),
        (["clip.webm"], [], ["clip.webm"], None),
        (["Is this a.png"], [], [], "Is this a.png"),
        (["README.md"], ["README.md"], [], None),  # and refused, since it is no picture
        (["x" * 5000], [], [], "x" * 5000),
    ],
)
def test_words_are_files_or_a_question(
    words: list[str], pictures: list[str], videos: list[str], question: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert sort_words(words) == ({"image": pictures, "video": videos}, question)


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (("run", PICTURE), 2, f"the model comes first, as in `hydra-engine run demo {PICTURE!r}`"),
        (("run", "What is it?"), 2, "the model comes first, as in `hydra-engine run demo 'What is it?'`"),
        (("run", "demo", "no-such.png", "--temperature", "0", "x"), 2, "no-such.png: no such file"),
        (("run", "--model", "demo", "README.md"), 2, "README.md: the image has an unsupported format"),
        (("run", "/no/model", "x"), 3, "there is no model directory '/no/model'"),
        (("run", "demo", "x", "--temperature", "9"), 2, "temperature must be a number between 0.0 and 2.0"),
        (("run", "demo", "--chat-template", "/no/file"), 2, "cannot read the chat template /no/file"),
        (("chat", "demo"), 2, "chat talks to a running server: give its address with --url; `hydra-engine run demo`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_wrong_is_said_before_anything_starts(
    command: tuple[str, ...], code: int, said: str, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("hydra_terminal.run._serving", None)
    done = here(*command)
    assert (done.returncode, done.stdout) == (code, "") and done.stderr.startswith(f"hydra-engine: {said}")
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path), "HYDRA_PORT": "1"}


def started(environment: dict[str, str], *arguments: str) -> Terminal:
    return Terminal([*RUN, "demo", "--threads", "1", *arguments], cwd=str(ROOT), environment=environment)


@pytest.mark.slow
def test_a_chat_with_a_picture(environment: dict[str, str]) -> None:
    with started(environment, PICTURE, "--temperature", "0") as terminal:
        assert "demo · cpu, 1 thread · ready in " in terminal.until(PROMPT.removesuffix("> "))
        terminal.until("attached stars.png (336 x 336, 2.5 KiB)\n> ")
        terminal.type("How many objects are there?\n")
        shown = terminal.until("stop\n")
        assert "There are three objects." in shown
        assert "prefill" in terminal.until("\n> ")
        terminal.type("/bye\n")
        assert terminal.ended() == 0


@pytest.mark.slow
def test_a_question_is_answered_and_lines_of_a_pipe_too(environment: dict[str, str]) -> None:
    command = [*RUN, "demo", "--threads", "1", "--temperature", "0"]
    one = [*command, PICTURE, "How many objects are there?"]
    done = subprocess.run(one, capture_output=True, text=True, cwd=ROOT, timeout=120, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "There are three objects.\n", "")
    lines = "What is two plus three?\n/retry\n/set colour red\n"
    done = subprocess.run(command, input=lines, capture_output=True, text=True, cwd=ROOT, timeout=120, env=environment)
    assert (done.returncode, done.stdout) == (1, "Two plus three is five.\n" * 2)
    assert done.stderr.startswith("hydra-engine: 'colour' cannot be set") and done.stderr.count("\n") == 1


def interrupt_twice(terminal: Terminal) -> int:
    terminal.interrupt("Ctrl-C again or Ctrl-D leaves\n> ")
    return terminal.ended(interrupts=True)


def end_with(number: int) -> Callable[[Terminal], int]:
    def end(terminal: Terminal) -> int:
        os.kill(terminal.process.pid, number)
        return terminal.ended()

    return end


@pytest.mark.drawn
@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"),
    [
        (interrupt_twice, 130),
        (end_with(signal.SIGTERM), 128 + signal.SIGTERM),
        (end_with(signal.SIGHUP), 128 + signal.SIGHUP),
        (end_with(signal.SIGKILL), -signal.SIGKILL),
    ],
    ids=["ctrl-c", "SIGTERM", "SIGHUP", "SIGKILL"],
)
@pytest.mark.parametrize("when", ["starting", "answering"])
def test_no_process_is_left(when: str, end: Callable[[Terminal], int], code: int, environment: dict[str, str]) -> None:
    with started(environment) as terminal:
        if when == "starting":
            while not descendants(terminal.process.pid):
                time.sleep(0.01)
            end, code = (lambda _: terminal.ended(interrupts=True), 130) if end is interrupt_twice else (end, code)
        else:
            terminal.until(PROMPT)
            terminal.type("/set min_tokens 1500\nHello!\n")
            terminal.until("Hello!\n")
            terminal.anything()
        children = descendants(terminal.process.pid)
        assert children and end(terminal) == code
        deadline_s = time.monotonic() + GONE_S
        while left := [processes.command(child.pid) for child in children if processes.is_running(child.pid)]:
            assert time.monotonic() < deadline_s, left
            time.sleep(0.05)


@pytest.mark.slow
def test_an_instance_that_dies_is_started_again(environment: dict[str, str]) -> None:
    with started(environment, "--temperature", "0", "--recovery-s", "60") as terminal:
        terminal.until(PROMPT)
        instance = next(
            child.pid
            for child in descendants(terminal.process.pid)
            if "hydra_engine.cluster.process" in processes.command(child.pid)
        )
        os.kill(instance, signal.SIGKILL)
        terminal.type("What is two plus three?\n")
        terminal.until("Two plus three is five.\n")
        terminal.until("\n> ")
        terminal.type("\x04")
        assert terminal.ended() == 0

"""`chat` against a real server: as a person on a terminal, and through pipes."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import KEY, ROOT, Started
from tests.cli.terminal import Terminal

CHAT = [sys.executable, "-m", "hydra_engine", "chat"]
PICTURE = "hydra_engine/demo/pictures/stars.png"
ANSWER = "There are three objects."


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "HYDRA_API_KEY": KEY, "XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}


@pytest.fixture
def terminal(server: Started, environment: dict[str, str]) -> Iterator[Terminal]:
    with Terminal([*CHAT, "--url", server.url], cwd=str(ROOT), environment=environment) as terminal:
        terminal.until("/quit leaves.\n> ")
        yield terminal


def piped(
    server: Started, stdin: str, *arguments: str, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    command = [*CHAT, "--url", server.url, *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=ROOT, timeout=120, env=environment)


def test_a_picture_a_question_a_timeline_and_a_stop(
    terminal: Terminal, environment: dict[str, str], tmp_path: Path
) -> None:
    # A picture that no other test asks about: what is in the cache has no encode in its timeline,
    # and a line below the answer that the terminal may have to break.
    terminal.type("/ima\thydra_engine/demo/pict\tdi\t\n")
    terminal.until("attached diamonds.png (336 x 336, 3.2 KiB)\n> ")
    terminal.type("How many objects are there?\n")
    shown = terminal.until("\n> ")
    below = shown.split("There are four objects.")[-1]
    assert re.search(
        r"\d+ tokens in \(9 of pictures\) · 6 out · first after [\d.]+ s · [\d.]+ tok/s · stop\n",
        below,
    )
    for stage in ("tokenize", "preprocess", "prefill", "decode"):
        assert f"\n{stage} " in below
    assert "\x1b[35m|" in terminal.raw  # encode has its colour

    terminal.type("/timeline off\n/set min_tokens 1500\n")
    terminal.until("min_tokens=1500\n> ")
    for _ in range(3):  # on a busy machine an answer may be there before the key is
        terminal.type("Hello!\n")
        terminal.until("Hello!\n")
        terminal.anything()
        if "stopped; Ctrl-D leaves" in terminal.interrupt("leaves\n> "):
            break
    else:
        pytest.fail("no answer was stopped")
    terminal.type("/set min_tokens off\n/retry\n")
    shown = terminal.until("stop\n> ")  # the reason, at the end of the line below the answer
    assert "decode" not in shown.split("/retry")[-1]

    terminal.interrupt("Ctrl-C again or Ctrl-D leaves\n> ")
    terminal.type("\x04")
    assert terminal.ended() == 0
    history = tmp_path / "state" / "hydra-engine" / "chat-history"
    assert "How many objects are there?" in history.read_text().splitlines()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


@pytest.mark.slow
def test_two_interrupts_leave(terminal: Terminal) -> None:
    terminal.interrupt("Ctrl-C again or Ctrl-D leaves\n> ")
    assert terminal.ended(interrupts=True) == 130


def test_a_line_goes_on_after_a_backslash(terminal: Terminal) -> None:
    terminal.type("How many objects\\\n")
    terminal.until(". ")
    terminal.type("are there?\n")
    terminal.until("\n> ")
    terminal.type("/history\n")
    assert "user: How many objects\nare there?\nassistant: " in terminal.until("> ")


def test_a_pipe_gets_answers_and_nothing_else(server: Started, environment: dict[str, str]) -> None:
    done = piped(server, f"/image '{PICTURE}'\nHow many objects are there?\n", environment=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, ANSWER + "\n", "")


def test_a_pipe_can_ask_for_the_timeline(server: Started, environment: dict[str, str]) -> None:
    done = piped(server, "How many objects are there?\n", "--timeline", "--image", PICTURE, environment=environment)
    assert done.stdout.startswith(ANSWER + "\n") and "\x1b" not in done.stdout
    for stage in ("tokenize", "preprocess", "prefill", "decode"):
        assert f"\n{stage} " in done.stdout


def test_every_command(server: Started, environment: dict[str, str], tmp_path: Path) -> None:
    picture = tmp_path / "my stars.png"
    picture.write_bytes((ROOT / PICTURE).read_bytes())
    lines = [
        "/system Answer briefly.",
        "/system",
        "/image ~/my\\ stars.png '~/my stars.png'",
        "/image",
        "/set temperature 0.5",
        "/set seed=7",
        "How many objects are there?",
        "/history",
        "/retry",
        "/save ~/talk.json",
        "/new",
        "/history",
        "/help",
        "/quit",
        "never asked",
    ]
    done = piped(server, "\n".join(lines), environment=environment)
    assert (done.returncode, done.stderr) == (0, "")
    shown = done.stdout.splitlines()
    assert shown[0] == "Answer briefly." and shown[1] == ", ".join(["my stars.png (336 x 336, 2.5 KiB)"] * 2)
    assert shown[3] == "user: [my stars.png] [my stars.png] How many objects are there?"
    assert shown[4] == f"assistant: {shown[2]}" and shown[5] == shown[2]  # the same seed, the same text
    assert shown[6] == "the conversation is empty" and "/retry" in done.stdout
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["model"] == "demo" and saved["settings"] == {"temperature": 0.5, "seed": 7}
    assert [message["role"] for message in saved["messages"]] == ["system", "user", "assistant"]
    assert [part["type"] for part in saved["messages"][1]["content"]] == ["image_url", "image_url", "text"]


WRONG = (
    ("/nonsense", "there is no command /nonsense; /help lists them"),
    ("/image no-such.png", "cannot read no-such.png: No such file or directory"),
    ("/image ~/text.png", "is not a picture"),
    ("/set colour red", "'colour' cannot be set; the names are temperature,"),
    ("/set top_k many", "top_k takes a whole number, or off"),
    ("/set temperature", "give a value: /set temperature 0.7"),
    ("/save ~/talk.json", "exists already; choose another name"),
    ("/save", "give one file name"),
    ("/retry", "there is no question to repeat"),
    ("/timeline maybe", "/timeline on, or /timeline off"),
    ("/set temperature 5\nHello!\n/set temperature 0", "temperature: Expected number <= 2.0"),
    ("/image http://127.0.0.1:8081/x.png\nHello!", "private"),
)


def test_what_goes_wrong_is_said_and_the_next_question_is_asked(
    server: Started, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "talk.json").write_text("mine")
    (tmp_path / "text.png").write_text("no picture")
    lines = [line for line, _ in WRONG]
    done = piped(server, "\n".join([*lines, "What is two plus three?", ""]), environment=environment)
    assert done.returncode == 1 and done.stdout == "Two plus three is five.\n"
    said = done.stderr.splitlines()
    assert len(said) == len(WRONG), done.stderr
    for (line, words), sentence in zip(WRONG, said, strict=True):
        assert sentence.startswith("hydra-engine: ") and words in sentence, line
    assert (tmp_path / "talk.json").read_text() == "mine"


def test_a_wrong_key_and_a_wrong_model_are_the_servers_words(server: Started, environment: dict[str, str]) -> None:
    del environment["HYDRA_API_KEY"]
    done = piped(server, "Hello!\n", environment=environment)
    assert done.returncode == 1 and "Incorrect API key provided, or none" in done.stderr and "--api-key" in done.stderr
    done = piped(server, "Hello!\n", "--api-key", KEY, "--model", "other", environment=environment)
    assert done.returncode == 1 and "`other` does not exist" in done.stderr


def test_without_a_server_it_says_how_to_start_one(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*CHAT, "--url", "http://127.0.0.1:9"], capture_output=True, text=True, cwd=ROOT, timeout=60, env=environment
    )
    assert done.returncode == 4 and "no server answers" in done.stderr and "hydra-engine serve" in done.stderr
    assert len(done.stderr.splitlines()) == 1

"""Output of `chat` for an answer."""

from __future__ import annotations

import io

import pytest

from hydra_terminal.client import Answer, Piece, pieces_of
from hydra_terminal.screen import Screen, clean, coloured


def test_an_answer_cannot_drive_the_terminal() -> None:
    assert clean("a\x1b[2Jb\x07\x9b1mc\r\n\td\x7f") == "a[2Jb1mc\n\td"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    return Terminal()


def test_pieces_of_an_answer_stay_text_on_a_terminal(terminal: Terminal) -> None:
    screen = Screen(terminal, plain=False)
    screen.write("**a** \x1b[2J")
    screen.write("b")
    assert terminal.getvalue() == "**a** [2Jb"


def test_a_timeline_has_colours_and_fits_the_terminal(terminal: Terminal) -> None:
    line = f"{'encode':12} |  ███  |      1.0 ms  {'x' * 40}"
    Screen(terminal, plain=False).timeline([line])
    assert terminal.getvalue() == coloured(line[:40]) + "\n" and "\x1b[35m|" in coloured(line)


def test_reasoning_is_dim_on_a_terminal_and_nothing_on_a_pipe(terminal: Terminal) -> None:
    event = {"choices": [{"delta": {"reasoning": "Hm\x1b.", "reasoning_content": "Hm\x1b.", "content": "So."}}]}
    answer = Answer()
    assert pieces_of(event, answer) == [Piece("Hm\x1b.", is_thought=True), Piece("So.")] and answer.text == "So."
    Screen(terminal, plain=False).think("Hm\x1b.")
    assert terminal.getvalue() == "\x1b[2mHm.\x1b[0m"
    pipe = io.StringIO()
    Screen(pipe, plain=False).think("Hm.")
    assert pipe.getvalue() == ""


@pytest.mark.parametrize("variable", [None, "NO_COLOR"])
def test_colours_can_be_turned_off(terminal: Terminal, variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    screen = Screen(terminal, plain=variable is None)
    screen.note("a note")
    screen.error("an error")
    screen.timeline(["late: 3 ms"])
    assert terminal.getvalue() == "a note\nan error\nlate: 3 ms\n"

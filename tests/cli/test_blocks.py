"""Markdown while it is written: what is printed for good is what would have been printed at the end."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hydra_engine.cli.talk.blocks import clean, split_blocks
from hydra_engine.cli.talk.screen import TerminalScreen

TEXT = (
    "# Title\n\nOne *two*\nthree.\n\n- a\n\n  more of a\n- b\n\n```py\nx = 1\n\ny = 2\n```\n\n1. one\n\n2. two\n\nEnd"
)


def test_blocks_end_at_blank_lines_but_not_in_code_or_lists() -> None:
    done, rest = split_blocks(TEXT)
    assert done == [
        "# Title\n\n",
        "One *two*\nthree.\n\n",
        "- a\n\n  more of a\n- b\n\n",
        "```py\nx = 1\n\ny = 2\n```\n\n",
        "1. one\n\n",
        "2. two\n\n",
    ]
    assert rest == "End"


def test_a_fence_is_closed_by_its_own_kind_only() -> None:
    assert split_blocks("~~~\n```\n\nx\n\n~~~\n\ny")[0] == ["~~~\n```\n\nx\n\n~~~\n\n"]
    assert split_blocks("````\n```\n\nx")[0] == []


@given(st.text(alphabet="ab \n`~-1.#", max_size=80), st.data())
def test_pieces_make_the_same_blocks_as_the_whole(text: str, data: st.DataObject) -> None:
    whole, last = split_blocks(text)
    assert "".join(whole) + last == text
    blocks: list[str] = []
    rest = ""
    position = 0
    while position < len(text):
        size = data.draw(st.integers(1, 8))
        done, rest = split_blocks(rest + text[position : position + size])
        blocks += done
        position += size
    assert "".join(blocks) + rest == text


def test_an_answer_cannot_drive_the_terminal() -> None:
    assert clean("a\x1b[2Jb\x07\x9b1mc\r\n\td\x7f") == "a[2Jb1mc\n\td"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_what_stays_on_the_terminal_does_not_depend_on_the_pieces(size: int) -> None:
    file = io.StringIO()
    console = Console(file=file, width=60, height=20, force_terminal=False, legacy_windows=False)
    with TerminalScreen(console, markdown=True).answer() as write:
        for begin in range(0, len(TEXT), size):
            write(TEXT[begin : begin + size])
    shown = [line.strip() for line in file.getvalue().splitlines() if line.strip()]
    assert shown == ["Title", "One two three.", "• a", "more of a", "• b", "x = 1", "y = 2", "1 one", "2 two", "End"]

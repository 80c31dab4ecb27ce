"""Markdown that is still being written: which blocks of it are done and will never look different.

A block that is done can be printed for good; only the rest is drawn again and again. Does not know how it is drawn.
"""

from __future__ import annotations

import re

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
# Everything that moves a cursor or changes a terminal; answers have no business with it.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def clean(text: str) -> str:
    """Without control characters other than newline and tab."""
    return text.translate(_CONTROLS)


def split_blocks(text: str) -> tuple[list[str], str]:
    """(blocks that are done, the rest). A block ends with a blank line outside of a code fence, once the next line has
    begun and is not indented: an indented one would belong to a list item."""
    done: list[str] = []
    begin = position = 0
    fence, blank = "", False
    for line in text.splitlines(keepends=True):
        if blank and not fence and line.strip() and not line[0].isspace():
            done.append(text[begin:position])
            begin = position
        if found := _FENCE.match(line):
            if not fence:
                fence = found[1]
            elif found[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        blank = not line.strip()
        position += len(line)
    return done, text[begin:]

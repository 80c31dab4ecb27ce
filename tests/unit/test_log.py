"""A log line is one line, whoever wrote the words in it."""

from __future__ import annotations

import io
import logging

import pytest

from hydra_engine.log import LineFormatter, escaped


@pytest.fixture
def lines() -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("%(levelname)s %(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    return logger, stream


@pytest.mark.parametrize("end", ["\n", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])
def test_nobody_can_forge_a_line(lines: tuple[logging.Logger, io.StringIO], end: str) -> None:
    logger, stream = lines
    logger.warning("no such model %s", f"x{end}ERROR all is lost")
    assert len(stream.getvalue().splitlines()) == 1 and "all is lost" in stream.getvalue()


def test_terminals_are_not_written_to(lines: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = lines
    logger.warning("%s", "\x1b[2J\x07\x00\x7f\x9b31m\u202eabc äöü 猫 \\n")
    assert stream.getvalue() == "WARNING \\x1b[2J\\x07\\x00\\x7f\\x9b31m\\u202eabc äöü 猫 \\n\n"
    assert escaped("plain text, 猫") == "plain text, 猫"


def test_tracebacks_are_indented(lines: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = lines
    try:
        raise ValueError("bad\nERROR all is lost\x1b[2J")
    except ValueError:
        logger.exception("it failed")
    first, *rest = stream.getvalue().splitlines()
    assert first == "ERROR it failed" and len(rest) > 3
    assert all(line.startswith("    ") for line in rest) and "\x1b" not in stream.getvalue()

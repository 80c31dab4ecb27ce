"""A log line is one line, whoever wrote the words in it."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hydra_engine import log
from hydra_engine.log import MAX_REPEATS, MAX_WAITING_CHARS, LineFormatter, StandardError, escaped


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


@pytest.fixture
def package_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """The package's log as an entry point sets it up, into a string."""
    root, stream = logging.getLogger("hydra_engine"), io.StringIO()
    before = root.handlers[:], root.level, root.propagate, logging.raiseExceptions
    monkeypatch.setattr(sys, "stderr", stream)
    log.configure()
    yield stream
    root.handlers[:], root.level, root.propagate, logging.raiseExceptions = before


def test_what_repeats_is_counted(package_log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("hydra_engine.test")

    def fail(times: int) -> None:
        for _ in range(times):
            try:
                raise ValueError("a long traceback")
            except ValueError:
                logger.exception("the step failed")

    fail(1000)
    for number in range(30):
        logger.info("request %d", number)
    logger.warning("another line of code")
    lines = package_log.getvalue().splitlines()
    assert sum("the step failed" in line for line in lines) == MAX_REPEATS
    assert sum("request" in line for line in lines) == 30 and "another line of code" in lines[-1]

    monkeypatch.setattr(log, "REPEAT_PERIOD_S", 0.0)  # it is over
    fail(2)
    lines = package_log.getvalue().splitlines()[len(lines) :]
    assert f"{1000 - MAX_REPEATS} lines like the next one were left out" in lines[0]
    assert sum("the step failed" in line for line in lines) == 2


# ---- a standard error that nobody reads


class Pipe:
    """A pipe of the smallest size, read on demand."""

    def __init__(self) -> None:
        self.out, self.into = os.pipe()
        self.size = fcntl.fcntl(self.into, fcntl.F_SETPIPE_SZ, 4096)
        self.stream = StandardError(self.into)

    def read(self, end: str) -> str:
        found = b""
        while not found.endswith(end.encode()):
            found += os.read(self.out, 1 << 16)
        return found.decode()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    for fd in (made.out, made.into):
        os.close(fd)


def test_writing_never_waits_and_what_is_dropped_is_told(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler(pipe.stream)
    monkeypatch.setattr(logging.getLogger("hydra_engine.log"), "handlers", [handler])
    line = "x" * 1000 + "\n"
    most = (pipe.size + MAX_WAITING_CHARS) // len(line)
    for _ in range(most + 100):
        pipe.stream.write(line)
    dropped = pipe.stream.num_dropped
    assert 100 <= dropped <= 106  # the rest is in the pipe, in the queue, and one line in between
    pipe.stream.wait_written(0.01)  # nobody reads, and this ends all the same
    text = pipe.read("could not be written\n")
    assert text.startswith(line * (most + 100 - dropped))
    assert f"{dropped} lines of this process were dropped" in text[text.rindex("x\n") :]
    pipe.stream.write("as ever\n")
    assert pipe.read("\n") == "as ever\n" and pipe.stream.num_dropped == dropped


def test_a_pipe_that_must_not_block_gets_every_line(pipe: Pipe) -> None:
    os.set_blocking(pipe.into, False)
    text = "".join(f"{number}\n" for number in range(5000))
    pipe.stream.write(text)
    pipe.stream.write("end\n")
    assert pipe.read("end\n") == text + "end\n"


BROKEN = "from hydra_engine import log; import sys; log.never_wait(); log.configure(); log.log_always('a line'); "
SEEN = "sys.stderr.write('x'); sys.stderr.wait_written(); print(log.num_dropped(), end='')"


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_a_broken_standard_error_is_no_reason_to_fail(redirection: str) -> None:
    script = f'exec "$0" -c "$1" {redirection}'
    done = subprocess.run(
        ["sh", "-c", script, sys.executable, BROKEN + SEEN], stdout=subprocess.PIPE, text=True, timeout=20, check=False
    )
    assert (done.returncode, done.stdout) == (0, "2")

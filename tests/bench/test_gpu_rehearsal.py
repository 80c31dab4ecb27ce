"""`make gpu-check` rehearsed with a GPU that is made up: whatever fails, hangs, crashes or is killed, the archive
opens, the summary names it and the exit status is right."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_check.archive import MAX_BYTES, Archive, without_middle
from bench.gpu_check.outcomes import read, summary, write

ROOT = Path(__file__).parents[2]


def start(folder: Path, parts: str, *flags: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder.parent)}
    command = [sys.executable, "-m", "tests.bench.gpu_stand_in", parts, "--dir", str(folder), "--jobs", "2", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)  # type: ignore[call-overload]


class Kept:
    """Files that a check has left in its folder, with every byte of the archive read."""

    def __init__(self, folder: Path) -> None:
        self.files = dict(sizes(folder))
        with tarfile.open(folder / "gpu-check.tar.gz") as archive:
            members = {entry.name.removeprefix("gpu-check/"): archive.extractfile(entry) for entry in archive}
            self.data = {name: file.read() for name, file in members.items() if file is not None}
        self.check: dict[str, Any] = json.loads(self.data["check.json"])
        self.summary = (folder / "summary.md").read_text()

    @property
    def states(self) -> dict[str, str]:
        return {part["name"]: part["state"] for part in self.check["parts"]}


def sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """Names and sizes of files. A running check renames what it has written: a file that is gone is skipped."""
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            yield path.name, path.stat().st_size


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(condition: Any, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_what_goes_wrong_is_named_and_takes_nothing_from_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    check = start(folder, "build,tests,crashes,again,hangs,talks,works")
    said, _ = check.communicate(timeout=120)
    assert check.returncode == 1, said
    kept = Kept(folder)
    assert set(kept.files) == {"gpu-check.tar.gz", "summary.md"} and max(kept.files.values()) < 16 << 20
    assert kept.states == {
        "build": "ok",
        "tests-ops": "failed",
        "llava": "failed",
        "llava-again": "ok",
        "hangs": "out of time",
        "talks": "ok",
        "works": "ok",
    }
    assert said.splitlines()[-1].endswith("failed: tests-ops, llava, hangs")
    for words in ("**llava**: failed", "ended by SIGSEGV", "**hangs**: out of time", "| a row | 1 ms |"):
        assert words in kept.summary, words
    assert kept.data["hangs.log"] == b"so far\n" and kept.data["decode.json"].startswith(b'{"bench": "decode"')
    log = kept.data["talks.log"]
    assert log.startswith(b"first") and log.endswith(b"last") and b"bytes are left out" in log
    path = tmp_path / "outcomes.jsonl"
    path.write_bytes(kept.data["tests-ops.jsonl"])
    tests = read(path)
    assert tests.counts() == "9 passed, 8 failed, 1 skipped", "half of ten, four behind, and those that cost themselves"
    reasons = {name.rpartition("::")[2]: reason for name, reason in tests.reasons.items()}
    assert "odd ones fail" in reasons["test_half[3]"]
    assert "crashed" in reasons["test_hang"] and "crashed" in reasons["test_crash"]
    assert reasons["test_lost_device"] == "RuntimeError: launch failed (the device has failed)"
    assert "tests-ops: 9 passed, 8 failed, 1 skipped" in kept.summary and "no second GPU" in kept.summary
    assert "test_half[1]" in kept.summary and "test_half[9]" in kept.summary
    assert re.search(rb"Timeout .*?in test_hang", kept.data["tests-ops.log"], re.DOTALL), "where it hung"
    assert not [*tmp_path.glob("gpu-check-*")], "nothing stays behind"


@pytest.mark.slow
def test_the_decisive_call_goes_on_where_parts_hang_fail_and_are_killed(tmp_path: Path) -> None:
    """The other parts run, the archive knows of each before the next begins, and nothing is left running."""
    folder = tmp_path / "out"
    check = start(folder, "-", "--decide")
    said, _ = check.communicate(timeout=120)
    assert check.returncode == 1, said
    kept = Kept(folder)
    bad = {"ring": "out of time", "layer": "failed", "llava-1.5-7b": "failed", "colocate-llava-1.5-7b": "out of time"}
    assert {name: state for name, state in kept.states.items() if state != "ok"} == bad
    names = [*kept.states]
    assert names[0] == "build" and names[-1] == "serve-llava-1.5-7b" and "llava-1.5-7b-again" in names
    for index, name in enumerate(names):
        if name not in bad:
            assert int(kept.data[f"{name}.log"]) == index, f"{name} began before what went before it was kept"
    assert gone(int(kept.data["colocate-llava-1.5-7b.log"]))
    assert "what an activation behind a product costs" in kept.summary
    assert kept.summary.count("**not to be read from its document: ") == 2, "of products and layer"
    assert "known: NVIDIA H200; driver 580, nvcc 13.0, Python 3.12, torch 2.11, triton 3.6, transformers 5.17" in said
    assert "not known: card a GPU that is made up" in said.partition("1/")[0], "before anything runs"
    assert "not known: card a GPU that is made up" in kept.summary and "call: decide" in kept.summary
    assert said.splitlines()[-1].endswith("failed: ring, layer, llava-1.5-7b, colocate-llava-1.5-7b")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGALRM])
def test_a_signal_keeps_what_there_is_and_ends_what_runs(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "out"
    check = start(folder, "build,works,serves,works")
    until(
        lambda: [*tmp_path.glob("gpu-check-*/serves.log")] and next(tmp_path.glob("gpu-check-*/serves.log")).read_text()
    )
    pid = int(next(tmp_path.glob("gpu-check-*/serves.log")).read_text())
    check.send_signal(number)
    check.send_signal(number)  # an impatient one
    said, _ = check.communicate(timeout=30)
    assert check.returncode == 128 + number, said
    kept = Kept(folder)
    assert kept.states == {"build": "ok", "works": "ok", "serves": "interrupted"}
    assert (
        f"ended by {number.name}; failed: serves" in said.splitlines()[-1] and f"ended by {number.name}" in kept.summary
    )
    assert int(kept.data["serves.log"]) == pid
    until(lambda: gone(pid))


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    check = start(tmp_path / "file" / "out", "build,works")
    said, _ = check.communicate(timeout=60)
    assert check.returncode == 2 and "refused. nothing can be written to " in said.splitlines()[-1], said
    assert "build" not in said and "Traceback" not in said
    assert not [*tmp_path.glob("gpu-check-*")], "nothing stays behind"


@pytest.mark.slow
def test_where_the_results_go_can_be_lost_but_not_they(tmp_path: Path) -> None:
    """Takes the folder away, as a full disk does: the parts go on, and the last lines say where their files are."""
    folder = tmp_path / "out"
    check = start(folder, "build,blocks,works", "--dir", str(folder))
    said, _ = check.communicate(timeout=60)
    assert check.returncode == 1, said
    assert said.splitlines()[-1].endswith("nothing failed") and "Traceback" not in said
    (scratch,) = tmp_path.glob("gpu-check-*")
    assert f"what the parts wrote is in {scratch}" in said.splitlines()[-2]
    assert (scratch / "works.log").read_text() == "all well\n"


def test_a_full_disk_of_the_parts_leaves_whole_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Summary and check.json are never written to it."""
    scratch, folder = tmp_path / "scratch", tmp_path / "out"
    scratch.mkdir()
    (scratch / "check.json").write_text("{ half of one")
    Archive(folder, scratch).refresh({"check.json": b"{}", "summary.md": b"# whole"})
    with tarfile.open(folder / "gpu-check.tar.gz") as opened:
        assert {entry.name: opened.extractfile(entry).read() for entry in opened} == {  # type: ignore[union-attr]
            "gpu-check/check.json": b"{}",
            "gpu-check/summary.md": b"# whole",
        }
    assert (folder / "summary.md").read_bytes() == b"# whole"


@pytest.mark.slow
def test_a_build_without_cuda_ends_it_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    check = start(folder, "no-build,works")
    said, _ = check.communicate(timeout=60)
    assert check.returncode == 1
    assert Kept(folder).states == {"build": "failed", "works": "not run"}
    assert said.splitlines()[-1].endswith("failed: build; not run: works") and "no nvcc found" in Kept(folder).summary


@pytest.mark.slow
def test_killed_at_any_moment_the_archive_is_whole(tmp_path: Path) -> None:
    """SIGKILL, which no handler sees, leaves the last archive too."""
    order = random.Random(17)
    for turn in range(12):
        folder, number = tmp_path / f"out{turn}", order.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        check = start(folder, "build,talks,works,crashes,hangs,serves,works")
        until(lambda folder=folder: (folder / "gpu-check.tar.gz").exists())
        until(lambda folder=folder, count=turn % 5: len(Kept(folder).states) >= count)
        time.sleep(order.random() * 0.5)
        check.send_signal(number)
        check.communicate(timeout=60)
        assert check.returncode == (-number if number is signal.SIGKILL else 128 + number)
        kept = Kept(folder)
        assert len(kept.states) >= turn % 5
        assert len(kept.files) <= 8 and all(size < 16 << 20 for size in kept.files.values())
        assert number is signal.SIGKILL or f"ended by {number.name}" in kept.summary


def test_what_cannot_be_written_leaves_the_last_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, folder = tmp_path / "scratch", tmp_path / "out"
    (scratch / "site").mkdir(parents=True)
    (scratch / "site" / "package.py").write_text("of no use")
    (scratch / "one.log").write_text("first")
    (scratch / ".unfinished.json").write_text("{")
    archive = Archive(folder, scratch)
    archive.refresh({})
    (scratch / "one.log").write_text("second")

    def full(self: Path, data: bytes) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(Path, "write_bytes", full)
        archive.refresh({})
    assert [path.name for path in folder.iterdir()] == ["gpu-check.tar.gz"], "no half of a new one"
    with tarfile.open(folder / "gpu-check.tar.gz") as opened:
        (entry,) = opened
        assert entry.name == "gpu-check/one.log"


@pytest.mark.slow
def test_an_archive_stays_below_what_can_be_carried(tmp_path: Path) -> None:
    for name in "abcdef":
        (tmp_path / f"{name}.log").write_bytes(os.urandom(6 << 20))
    Archive(tmp_path / "out", tmp_path).refresh({})
    assert (tmp_path / "out" / "gpu-check.tar.gz").stat().st_size <= MAX_BYTES


def test_a_middle_is_left_out_with_its_size() -> None:
    assert without_middle(b"abc", 3) == b"abc"
    assert without_middle(b"a" * 10 + b"b" * 10, 4) == b"aa\n... 16 bytes are left out ...\nbb"


def test_outcomes_of_a_run_that_was_ended(tmp_path: Path) -> None:
    """The worst of what is said of a test counts, and half a line nothing."""
    path = tmp_path / "tests.jsonl"
    for name, state in (("a", "begun"), ("a", "passed"), ("a", "failed"), ("b", "begun"), ("c", "skipped")):
        write(path, name, state, 1.0, f"{name} {state}")
    with path.open("ab") as file:
        file.write(b'{"test": "d", "sta')
    tests = read(path)
    assert dict(tests.states) == {"a": "failed", "b": "begun", "c": "skipped"} and tests.reasons["a"] == "a failed"
    lines = summary("tests-ops", tests)
    assert lines[0] == "tests-ops: 1 failed, 1 skipped, 1 not ended" and "tests-ops, did not end: `b`" in lines
    assert summary("none", read(tmp_path / "none")) == ["none: no test ran"]

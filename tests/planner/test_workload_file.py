"""Workload files: what is written comes back, and what no load can be is refused with the line and the reason."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hydra_engine.errors import ConfigError
from hydra_planner.workload import file as workload
from hydra_planner.workload.file import (
    Picture,
    Video,
    WorkloadRequest,
    header_line,
    problem_of,
    read_workload,
    request_line,
)
from tests.examples import examples
from tests.planner.workload_files import write_workload

HEADER = '{"format":"hydra-engine workload","version":1}'
ROW = '{"at_s":1.0,"prompt_tokens":8,"output_tokens":4}'


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: str, end: str = "\n") -> Path:
        path = tmp_path / "load.jsonl"
        path.write_text("\n".join(lines) + end, encoding="utf-8")
        return path

    return write


def row(**changes: Any) -> str:
    return json.dumps({"at_s": 1.0, "prompt_tokens": 8, "output_tokens": 4} | changes)


def test_everything_comes_back(tmp_path: Path) -> None:
    requests = (
        WorkloadRequest(at_s=0.0, prompt_tokens=32, output_tokens=64, pictures=(Picture(1024, 768, 0),), kind="pope"),
        WorkloadRequest(at_s=0.5, prompt_tokens=9, output_tokens=1, videos=(Video(640, 360, 240, 23.976, 1),)),
        WorkloadRequest(at_s=0.5, prompt_tokens=90, output_tokens=64, session=3, shared_tokens=64),
    )
    path = tmp_path / "load.jsonl"
    write_workload(path, requests, "three requests")
    assert read_workload(path) == requests
    lines = path.read_text().splitlines()
    assert json.loads(lines[0]) == {"format": workload.FORMAT, "version": 1, "source": "three requests"}
    assert json.loads(lines[3]) == {
        "at_s": 0.5,
        "prompt_tokens": 90,
        "output_tokens": 64,
        "session": 3,
        "shared_tokens": 64,
    }, "what a request does not have is not written"


_sides = st.integers(1, 1 << 20)
_numbers = st.integers(0, (1 << 63) - 1)
_rows = st.builds(
    WorkloadRequest,
    at_s=st.floats(0, 1e9),
    prompt_tokens=st.integers(64, 1 << 24),
    output_tokens=st.integers(1, 1 << 24),
    pictures=st.lists(st.builds(Picture, _sides, _sides, _numbers), max_size=3).map(tuple),
    videos=st.lists(
        st.builds(Video, _sides, _sides, st.integers(1, 1 << 20), st.floats(1e-3, 1e3), _numbers), max_size=2
    ).map(tuple),
    session=_numbers,
    shared_tokens=st.integers(0, 64),
    kind=st.text(max_size=8),
)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=st.lists(_rows, min_size=1, max_size=6), cut=st.integers(0, 1 << 16))
def test_any_load_comes_back_and_so_does_what_is_whole_of_a_torn_one(
    tmp_path: Path, rows: list[WorkloadRequest], cut: int
) -> None:
    rows.sort(key=lambda request: request.at_s)
    path = tmp_path / "load.jsonl"
    write_workload(path, rows)
    assert read_workload(path) == tuple(rows)
    whole = path.read_bytes()
    first = len(header_line()) + 1 + len(request_line(rows[0]))
    cut = first + cut % (len(whole) - first)
    path.write_bytes(whole[:cut])
    found = read_workload(path)
    ends = [
        first + sum(1 + len(request_line(request)) for request in rows[1:count]) for count in range(1, len(rows) + 1)
    ]
    assert found == tuple(rows[: sum(end <= cut for end in ends)])


def test_an_unwritten_end_of_the_last_line_changes_nothing(file: Callable[..., Path]) -> None:
    assert len(read_workload(file(HEADER, ROW, ROW, end=""))) == 2
    assert len(read_workload(file(HEADER, ROW, ROW[:-1], end=""))) == 1
    with pytest.raises(ConfigError, match="has no requests"):
        read_workload(file(HEADER, ROW[:-1], end=""))


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ((HEADER, ROW, "", ROW), "has a line 3 that is no request: it is empty"),
        ((HEADER, ROW, ""), "has a line 3 that is no request: it is empty"),
        (
            (HEADER, row(at_s=2), row(at_s=1.5)),
            "is out of order: line 3 comes before the one above it; sort it by at_s",
        ),
        ((HEADER, row(at_s=math.nan)), "has a line 2 that is no request"),
        ((HEADER, row(at_s="soon")), r"has a line 2 that is no request: Expected `float`, got `str` - at `\$.at_s`"),
        ((HEADER, row(prompt="secret")), "no request: Object contains unknown field `prompt`"),
        ((HEADER, row(pictures=[[8, 8]])), r"no request: .* at `\$.pictures\[0\]`"),
        ((HEADER, row(pictures=[[8, 8, 0, 1]])), "no request: Expected `array` of at most length 3"),
        ((HEADER, '{"at_s":1.0}'), "no request: Object missing required field `prompt_tokens`"),
        ((HEADER, ROW + ROW), "has a line 2 that is no request"),
        ((HEADER, row(at_s=-1)), "has a line 2 that makes no sense: at_s must be a number of seconds, 0 or more"),
        (
            (HEADER, ROW, row(prompt_tokens=0)),
            "line 3 that makes no sense: prompt_tokens must be between 1 and 16777216",
        ),
        ((HEADER, row(output_tokens=-4)), "output_tokens must be between 1"),
        ((HEADER, row(shared_tokens=-1, session=0)), "shared_tokens must be between 0"),
        ((HEADER, row(shared_tokens=9, session=0)), "shared_tokens must not exceed prompt_tokens"),
        ((HEADER, row(shared_tokens=4)), "shared_tokens needs a session"),
        ((HEADER, row(session=-1)), "session must be 0 or more"),
        ((HEADER, row(pictures=[[0, 8, 0]])), "a picture of 0 x 8 pixels cannot be"),
        ((HEADER, row(pictures=[[8, 1 << 21, 0]])), "a picture of 8 x 2097152 pixels cannot be"),
        ((HEADER, row(pictures=[[8, 8, -1]])), "the number of a picture must be 0 or more"),
        ((HEADER, row(videos=[[8, 8, 0, 24.0, 0]])), "a video needs frames"),
        ((HEADER, row(videos=[[8, 8, 9, 0.0, 0]])), "a video needs frames, and frames per second"),
        ((HEADER,), "has no requests"),
        ((ROW,), "is no workload: its first line must be"),
        (("",), "is no workload"),
        (('{"format":"other","version":1}', ROW), "is no workload"),
        (('{"format":"hydra-engine workload","version":2}', ROW), "of version 2; this version of the engine reads 1"),
        (('{"format":"hydra-engine workload","version":1,"more":1}', ROW), "is no workload"),
    ],
)
def test_what_no_load_can_be_is_refused(file: Callable[..., Path], lines: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^the workload load.jsonl .*{problem}") as refused:
        read_workload(file(*lines))
    assert refused.value.param == "workload" and "\n" not in refused.value.message


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    path.write_bytes(HEADER.encode() + b"\n" + b'{"kind":"\xff"}\n')
    with pytest.raises(ConfigError, match="has a line 2 that is no request"):
        read_workload(path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match="is no workload"):
        read_workload(path)


def test_a_file_that_is_not_there_or_too_long_is_refused(
    file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"^the workload none.jsonl cannot be read: No such file or directory$"):
        read_workload(tmp_path / "none.jsonl")
    monkeypatch.setattr(workload, "MAX_REQUESTS", 2)
    assert len(read_workload(file(HEADER, ROW, ROW))) == 2
    with pytest.raises(ConfigError, match="has 3 requests; give at most 2"):
        read_workload(file(HEADER, ROW, ROW, ROW))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_no_request(value: float) -> None:
    """A file cannot hold such a number: it is written as null."""
    request = WorkloadRequest(at_s=value, prompt_tokens=1, output_tokens=1)
    assert problem_of(request) is not None
    video = Video(8, 8, 9, value, 0)
    assert problem_of(WorkloadRequest(at_s=0, prompt_tokens=1, output_tokens=1, videos=(video,))) is not None

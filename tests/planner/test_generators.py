"""Loads by name: equal for equal seeds, as large as their shapes say, at the rate that was asked for."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest

from hydra_engine.errors import ConfigError
from hydra_planner.workload.arrivals import Arrivals
from hydra_planner.workload.file import WorkloadRequest, problem_of, read_workload
from hydra_planner.workload.generators import LOADS, Load, draw, make_load, read_or_make
from hydra_planner.workload.shapes import MIXED, SHAPES, TEXT
from tests.planner.workload_files import write_workload


@pytest.mark.quick("textcaps", "pope")
@pytest.mark.parametrize("name", LOADS)
def test_every_load_is_repeatable_can_be_written_and_has_the_sizes_of_its_shapes(name: str, tmp_path: Path) -> None:
    rows = make_load(name, 300, 4.0, seed=7)
    assert rows == make_load(name, 300, 4.0, seed=7) != make_load(name, 300, 4.0, seed=8)
    assert not [row for row in rows if problem_of(row) is not None]
    path = tmp_path / "load.jsonl"
    write_workload(path, rows)
    assert read_workload(path) == rows
    shapes = {shape.name: shape for shape in (*LOADS[name].shapes, TEXT)}
    assert {row.kind for row in rows} - {TEXT.name} == {shape.name for shape in LOADS[name].shapes} - {TEXT.name}
    for row in rows:
        shape = shapes[row.kind]
        assert shape.output.least <= row.output_tokens <= shape.output.most
        assert len(row.pictures) in ({0, shape.pictures} if shape.text_share else {shape.pictures})
        assert {(picture.width, picture.height) for picture in row.pictures} <= {size[:2] for size in shape.sizes}
        if not row.shared_tokens:
            assert shape.text.least <= row.prompt_tokens <= shape.text.most


@pytest.mark.parametrize("arrivals", ["poisson", "gamma:3", "onoff:5,5"])
@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_a_load_comes_at_its_rate(rate: float, arrivals: str) -> None:
    rows = make_load("textcaps", 200, rate, 3, Arrivals.parse(arrivals))
    times_s = [row.at_s for row in rows]
    assert times_s == sorted(times_s) and times_s[0] >= 0 and len(set(times_s)) > 190
    last_s = 200 / rate - (5.0 if arrivals.startswith("onoff") else 0.0)  # the load ends with a silence
    assert 0.7 * last_s <= times_s[-1] <= last_s
    if arrivals.startswith("onoff"):
        assert all(at_s % 10.0 <= 5.0 for at_s in times_s)


def test_the_rate_changes_times_alone() -> None:
    slow, fast, offline = (make_load("mixed", 50, rate, 3) for rate in (1.0, 10.0, None))
    assert [row.at_s for row in slow] == pytest.approx([10 * row.at_s for row in fast])
    assert {row.at_s for row in offline} == {0.0}
    assert timeless(slow) == timeless(fast) == timeless(offline)


def timeless(rows: tuple[WorkloadRequest, ...]) -> list[tuple[object, ...]]:
    return [(row.kind, row.prompt_tokens, row.output_tokens, row.pictures, row.session) for row in rows]


@pytest.mark.parametrize(
    ("name", "size"), [("epd-2", (4032, 3024)), ("epd-8", (4032, 3024)), ("epd-10-787x444", (787, 444))]
)
def test_epds_requests_have_several_pictures_and_no_other_differences(name: str, size: tuple[int, int]) -> None:
    rows = make_load(name, 40, 1.0, 0)
    count = int(name.split("-")[1])
    assert {(len(row.pictures), row.prompt_tokens, row.output_tokens) for row in rows} == {(count, 22, 10)}
    assert {(picture.width, picture.height) for row in rows for picture in row.pictures} == {size}
    assert len({picture.number for row in rows for picture in row.pictures}) == 40 * count


def test_averages_of_epd_serves_samples_are_those_that_it_gives() -> None:
    shared = make_load("sharegpt-4o", 2000, None, 1)
    assert mean(row.prompt_tokens for row in shared) == pytest.approx(9.6, abs=0.3)
    mixed = make_load("visualwebinstruct", 2000, None, 1)
    assert mean(row.prompt_tokens for row in mixed) == pytest.approx(63.1, abs=2)
    assert mean(bool(row.pictures) for row in mixed) == pytest.approx(0.5, abs=0.03)
    assert {row.output_tokens for row in (*shared, *mixed)} == {64}


def test_questions_share_pictures_as_in_their_data_set() -> None:
    rows = make_load("pope", 3000, None, 5)
    assert 3000 / len({row.pictures[0].number for row in rows}) == pytest.approx(SHAPES["pope"].questions, rel=0.15)
    apart = draw(Load((SHAPES["pope"],), reuse=False), 300, 5)
    assert len({row.pictures[0].number for row in apart}) == 300


def test_a_mixed_load_has_text_and_all_data_sets() -> None:
    rows = make_load("mixed", 2000, None, 2)
    assert {row.kind for row in rows} == {*MIXED, TEXT.name}
    assert mean(row.kind == TEXT.name for row in rows) == pytest.approx(0.25, abs=0.03)
    assert not any(row.pictures for row in rows if row.kind == TEXT.name)


@pytest.mark.parametrize("name", ["chat", "picture-chat"])
def test_turns_of_a_conversation_come_in_order_and_share_what_was_asked_before(name: str) -> None:
    rows = make_load(name, 1000, 5.0, 4)
    sessions: dict[int | None, list[WorkloadRequest]] = {}
    for row in rows:
        sessions.setdefault(row.session, []).append(row)
    assert None not in sessions
    assert 1000 / len(sessions) == pytest.approx(SHAPES[name].turns, rel=0.15)
    for turns in sessions.values():
        assert turns[0].shared_tokens == 0 and len({turn.pictures for turn in turns}) == 1
        for before, turn in pairwise(turns):
            assert turn.shared_tokens == before.prompt_tokens
            assert turn.prompt_tokens > before.prompt_tokens + before.output_tokens
    assert len({row.pictures for row in rows}) == (len(sessions) if SHAPES[name].pictures else 1)
    switches = sum(one.session != two.session for one, two in pairwise(rows))
    assert switches > 900, "conversations run beside each other"


def test_a_scale_shrinks_pictures_and_lengths() -> None:
    large, small = make_load("textcaps", 400, None, 0), make_load("textcaps", 400, None, 0, scale=0.25)
    for one, other in zip(large, small, strict=True):
        assert other.pictures[0].width == round(one.pictures[0].width / 4)
        assert other.pictures[0].number == one.pictures[0].number
    assert mean(row.output_tokens for row in small) == pytest.approx(
        mean(row.output_tokens for row in large) / 4, rel=0.1
    )


def test_a_name_a_name_with_a_rate_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_or_make("pope", 20, 3) == make_load("pope", 20, None, 3)
    assert read_or_make("pope@2.5", 20, 3) == make_load("pope", 20, 2.5, 3)
    rows = make_load("chat", 5, 1.0, 0)
    monkeypatch.chdir(tmp_path)
    for name in ("recorded.jsonl", "recorded", "night@4.jsonl"):
        write_workload(Path(name), rows)
        assert read_or_make(name, 99, 9) == rows
    write_workload(Path("pope"), rows)
    assert read_or_make("pope", 5, 0) == make_load("pope", 5, None, 0) and read_or_make("./pope", 5, 0) == rows


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("textcap", "there is no workload 'textcap'; did you mean textcaps?"),
        ("EPD-4@2.5", "there is no workload 'EPD-4'; did you mean epd-4?"),
        ("zzzzzz", "there is no workload 'zzzzzz'; give a file, or one of mixed, text, textcaps, "),
        ("pope@", "the workload 'pope@' needs requests a second behind its @, as in textcaps@4"),
        ("pope@fast", "the workload 'pope@fast' needs requests a second"),
        ("pope@0", "the rate of a workload is more than 0 requests a second, not 0.0"),
        ("pope@nan", "the rate of a workload is more than 0"),
        ("pope@inf", "the rate of a workload is more than 0"),
        ("none.jsonl", "the workload none.jsonl cannot be read"),
        ("folder/none", "the workload none cannot be read"),
    ],
)
def test_what_is_no_workload_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^{problem}".replace("?", r"\?")) as refused:
        read_or_make(text, 10, 0)
    assert refused.value.param == "workload"


@pytest.mark.parametrize(
    ("count", "scale", "problem"), [(0, 1.0, "between 1 and"), (10, 0.0, "the scale of a workload")]
)
def test_loads_of_no_size_are_refused(count: int, scale: float, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_load("pope", count, 1.0, 0, scale=scale)

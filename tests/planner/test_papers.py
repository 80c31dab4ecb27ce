"""The papers' experiments: all of them are there, closed forms have the papers' numbers where these add up, simulated
ones repeat themselves, and the page is that of the stored results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from bench.common import commit
from hydra_engine.__main__ import main
from hydra_engine.errors import ConfigError
from hydra_planner.commands.reproduce import SIMULATED, encoded, result_of, stored_results
from hydra_planner.papers import epd, epd_serve, heteroserve, hydrainfer, measured
from hydra_planner.papers.deployments import SCHEDULES, Runs, Setup, layout, num_devices
from hydra_planner.papers.experiments import EXPERIMENTS, find
from hydra_planner.papers.models import MODELS, spec_of
from hydra_planner.papers.page import DRAWN, PICTURES, page_text
from hydra_planner.papers.results import (
    FULL,
    QUICK,
    Cell,
    Result,
    Scale,
    Spread,
    Stored,
    Table,
    join_tables,
    leaders,
    number_of,
    shares_rows,
    table,
    tables_of,
    text_lines,
)
from hydra_planner.papers.simulations import Measured, Simulations
from hydra_planner.papers.traces import take_gaps
from hydra_planner.simulator.deployment import Deployment

ROOT = Path(__file__).parents[2]
LINES = ROOT / "bench" / "results" / "papers" / SIMULATED
STORED = stored_results()


def numbered(paper: str, kind: str, *numbers: int) -> set[str]:
    return {f"{paper}-{kind}{number}" for number in numbers}


def column(result: Result, name: str) -> dict[Cell, Cell]:
    """The column's cells by the first column's."""
    place = result.table.columns.index(name)
    return {row[0]: row[place] for row in result.table.rows}


# ---- the list


def test_every_experiment_of_the_papers_is_there_once() -> None:
    wanted = (
        numbered("heteroserve", "t", *range(1, 9))
        | numbered("heteroserve", "f", 1, 3)
        | {"heteroserve-5.3.4", "epd-5.3", "epd-serve-4.4"}
        | numbered("epd", "t", *range(1, 5))
        | numbered("epd", "f", 4, 5, 6)
        | numbered("hydrainfer", "t", 1, 2, 3)
        | numbered("hydrainfer", "f", *range(4, 15))
        | numbered("epd-serve", "t", *range(1, 6))
        | numbered("epd-serve", "f", 2, *range(6, 18))
    )
    names = [experiment.name for experiment in EXPERIMENTS]
    assert len(names) == len(set(names)) and set(names) == wanted


def test_an_experiment_runs_or_says_how_it_is_measured_or_where_it_is_described() -> None:
    for experiment in EXPERIMENTS:
        if experiment.how in ("simulated", "closed form"):
            assert experiment.run is not None, experiment.name
        if experiment.run is None:
            assert experiment.command or "docs/" in experiment.setting, experiment.name


def test_names_are_found_whatever_their_case_and_unknown_ones_name_the_nearest() -> None:
    assert find("HydraInfer-F11").name == "hydrainfer-f11"
    with pytest.raises(ConfigError, match="did you mean epd-serve-t5"):
        find("epdserve-t5")
    with pytest.raises(ConfigError, match="`hydra-engine reproduce` lists them"):
        find("x")


# ---- models and layouts


def test_models_have_the_sizes_and_cuts_that_the_papers_give() -> None:
    billions = {name: spec_of(name).language_bytes(2, 2) / 2e9 for name in MODELS}
    published = {"llava-13b": 13, "llava-34b": 34.4, "internvl2-8b": 7.7, "internvl2-26b": 19.9, "internvl3-78b": 72.7}
    for name, size in published.items():
        assert billions[name] == pytest.approx(size, rel=0.02), name
    cuts = {}
    for name in epd.MODELS.values():
        vision = spec_of(name).vision
        assert vision is not None
        cuts[name] = [len(vision.plan_image(*size).items) for size in epd.SIZES.values()]
    # EPD, Table 3.
    assert cuts == {"minicpm-v-2.6": [1, 3, 10], "internvl2-8b": [13, 3, 13], "internvl2-26b": [13, 3, 13]}


def test_layouts_are_read_as_both_papers_write_them() -> None:
    assert str(layout("1E3P4D").topology).startswith("E@cuda:0+P@cuda:1+P@cuda:2")
    assert str(layout("2(E-P)-D").topology) == "E@cuda:0+P@cuda:0+E@cuda:1+P@cuda:1+D@cuda:2"
    assert [num_devices(text) for text in ("EPD", "E-P-D", "(E-PD)", "EP+2D", "8EPD")] == [1, 3, 1, 3, 8]


# ---- closed forms


def test_ratios_are_those_of_equation_2() -> None:
    ratio = column(heteroserve.ratios(), "ratio")
    assert ratio["LLaVA-7B"] == pytest.approx(78, abs=0.5)
    assert ratio["LLaVA-13B"] == pytest.approx(98, abs=0.5)
    assert ratio["LLaVA-34B"] == pytest.approx(21, abs=0.5)
    assert ratio["Qwen-VL-72B"] == pytest.approx(24, abs=0.5)
    assert ratio["Qwen2.5-VL-7B"] == pytest.approx(9, abs=0.05), "and not 12"


def test_the_saving_at_the_papers_point_is_the_papers() -> None:
    assert column(heteroserve.savings(), "% at gamma 0.1875")[0.63] == pytest.approx(31.4, abs=0.05)


def test_intensities_of_a_decode_grow_with_its_batch_but_for_attention() -> None:
    rows = {row[:2]: row[2:] for row in hydrainfer.operations().table.rows}
    one, eight, many = rows["QKVO", "decode"]
    assert one == pytest.approx(2, rel=0.01) and isinstance(many, float) and isinstance(eight, float)
    assert eight == pytest.approx(16, rel=0.01) and many > 100
    assert len(set(rows["attention", "decode"])) == 1


def test_pictures_have_the_features_that_epd_serve_counts() -> None:
    features = column(epd_serve.transmissions(), "features")
    assert [features[size] for size in ("280x280", "560x560", "720x1280", "1080x1920", "4096x3112")] == [
        *(100, 400, 1196, 2691, 16206)
    ]
    assert features["640x960"] == 782, "and not 529"


# ---- simulations


def test_a_small_simulation_repeats_itself_and_shows_what_the_papers_do() -> None:
    def run(text: str) -> tuple[float, float]:
        tiny = replace(QUICK, requests_of_load=(16, 16), simulations=Simulations())
        setup = Setup(tiny, epd_serve.MODEL, (epd_serve.ASCEND,), "sharegpt-4o").with_limits(2.0, 0.05)
        runs = setup.at_rate(text, 12.0)
        return number_of(runs.ttft_ms), number_of(runs.tpot_ms)

    together, apart, shared = run("EPD"), run("EP-D"), run("(E-D)-P")
    assert run("EPD") == together
    assert apart[1] < shared[1] < together[1], "decodes apart have nothing beside them, those beside encodes little"


def test_scales_thin_out_points_and_keep_the_ends() -> None:
    assert QUICK.some((1, 2, 3, 4, 5), 3) == (1, 3, 5) and FULL.some((1, 2, 3), 2) == (1, 2, 3)
    assert QUICK.some((1, 2, 3), 1) == (1,) and FULL.requests(10) == 20


# ---- tables


def test_rows_stand_beside_those_of_their_name() -> None:
    ours = table(("model", "a", "b"), [("x", 1.23456, 2), ("y", 3, 4)])
    theirs = Table(("model", "b", "c"), (("y", 5, 6), ("z", 7, 8)))
    assert ours.rows[0] == ("x", 1.235, 2)
    assert join_tables(ours, theirs) == Table(
        ("model", "a", "b", "b, paper", "c, paper"),
        (("x", 1.235, 2, None, None), ("y", 3, 4, 5, 6), ("z", None, None, 7, 8)),
    )
    assert not shares_rows(ours, Table(("model", "b"), (("z", 1),)))
    assert text_lines(ours) == ["model     a  b", "x      1.24  2", "y         3  4"]


def test_every_stored_result_can_stand_beside_the_papers() -> None:
    for experiment in EXPERIMENTS:
        stored = STORED.get(experiment.name)
        assert (stored is None) == (experiment.run is None), experiment.name
        for _, shown in tables_of(experiment, None if stored is None else stored.result):
            assert all(len(row) == len(shown.columns) for row in shown.rows), experiment.name


# ---- the page


def test_the_page_is_that_of_the_stored_results() -> None:
    assert (ROOT / "docs" / "papers.md").read_text(encoding="utf-8") == page_text(STORED)


def test_the_page_shows_every_experiment_and_its_pictures_exist() -> None:
    page = page_text(STORED)
    assert re.findall(r"^### ([a-z0-9.-]+):", page, re.MULTILINE) == [experiment.name for experiment in EXPERIMENTS]
    assert set(re.findall(rf"\]\({PICTURES}/(.*)\.svg\)", page)) == set(DRAWN)
    assert all((ROOT / "docs" / PICTURES / f"{name}.svg").is_file() for name in DRAWN)
    assert "No result is stored." not in page and "No result is stored." in page_text({})


# ---- what was simulated


def test_equal_loads_are_simulated_once_and_others_again_when_a_source_has_changed(tmp_path: Path) -> None:
    asked: list[str] = []

    def simulate(key: str) -> Measured:
        asked.append(key)
        return Measured(0, 2, 1 / 3, 1.0, 1.0, False, (0.1,) * 3, (0.2,) * 3, 3.0, 4.0)

    for sources in ("a", "a", "b"):
        simulations = Simulations(tmp_path / "x", sources)
        for key in ("one", "two", "one"):
            found = simulations.get(key, partial(simulate, key))
        assert found.load_s == 0.333333 and set(simulations.take_used()) == {"one", "two"}
    assert asked == ["one", "two"] * 2
    again = Simulations(tmp_path / "x", None, again=["two"])
    assert again.get("one", lambda: simulate("one")) == found and len(asked) == 4
    assert again.get("two", lambda: simulate("two")) == found and len(asked) == 5
    assert len((tmp_path / "x").read_bytes().splitlines()) == 4, "reading adds nothing"


def test_names_share_the_first_place_where_their_ranges_meet() -> None:
    cells = {"a": Spread(5, 4, 7), "b": Spread(6, 5.5, 6.5), "c": Spread(3, 3, 3.95)}
    assert leaders(cells) == ["b", "a"] and leaders(cells, least=True) == ["c", "a"]
    assert leaders({"a": 1.0, "b": 1.03}) == ["b"] and leaders({"a": 1.0, "b": 1.015}) == ["b", "a"]


def test_a_rate_that_falls_behind_is_not_kept_and_two_seeds_of_three_decide() -> None:
    def runs(*behind: bool) -> Runs:
        return Runs(tuple(Measured(0, 9, 1.0, 1.0, 0.5, one, (0.0,) * 3, (0.0,) * 3, 1.0, 1.0) for one in behind))

    assert not runs(True).keeps_limits and runs(False).keeps_limits
    assert (
        runs(True, False, False).keeps_limits
        and not runs(True, True, False).keeps_limits
        and runs(True, True, False).falls_behind
    )


def scale_of(name: str, simulations: Simulations) -> Scale:
    return replace({"quick": QUICK, "full": FULL}[name], simulations=simulations)


class OnlyStored(Simulations):
    def get(self, key: str, simulate: Callable[[], Measured]) -> Measured:
        return super().get(key, unreachable)


def unreachable() -> Measured:
    raise AssertionError("a load is not stored: run `make papers`")


def test_stored_results_are_those_of_the_stored_loads() -> None:
    simulations = OnlyStored(LINES, None)
    for experiment in EXPERIMENTS:
        if (stored := STORED.get(experiment.name)) is not None:
            found = result_of(experiment, scale_of(stored.scale, simulations))
            assert found is not None and encoded(found) == encoded(stored), experiment.name


class Repeating(Simulations):
    """Simulates each of the `drawn` loads once more. Answers with what is stored, so that no search asks for others."""

    def __init__(self, drawn: Sequence[str]) -> None:
        super().__init__(LINES, None)
        self.drawn, self.others = set(drawn), list[str]()

    def get(self, key: str, simulate: Callable[[], Measured]) -> Measured:
        stored = super().get(key, unreachable)
        if key in self.drawn:
            self.drawn.remove(key)
            if Simulations().get(key, simulate) != stored:
                self.others.append(key)
        return stored


@pytest.mark.slow
def test_some_stored_loads_come_out_as_they_are_stored() -> None:
    """A page that is older than the scheduler fails here: which loads are repeated is drawn by the commit."""
    keys = set[str]()
    stored = OnlyStored(LINES, None)
    for experiment in EXPERIMENTS:
        if (one := STORED.get(experiment.name)) is not None:
            result_of(experiment, scale_of(one.scale, stored), keys)
    drawn = Random(commit()).sample(sorted(keys), 12)
    repeating = Repeating(drawn)
    for experiment in EXPERIMENTS:
        if (one := STORED.get(experiment.name)) is not None:
            result_of(experiment, scale_of(one.scale, repeating))
    assert not repeating.drawn and not repeating.others, f"run `make papers`: {repeating.others}"


# ---- other schedules and switches


def test_other_schedules_make_decodes_wait_longer() -> None:
    def longest(schedule: str) -> float:
        tiny = replace(QUICK, requests_of_load=(24, 24), simulations=Simulations())
        setup = Setup(tiny, hydrainfer.NEXT, (hydrainfer.H800,), "textvqa", schedule=schedule).with_limits(8.0, 0.02)
        return number_of(setup.traced("EPD", 8.0, "gaps", take_gaps).more("longest ms"))

    gaps = {schedule: longest(schedule) for schedule in SCHEDULES}
    assert gaps[""] < 0.5 * min(gaps["prefill first"], gaps["batches to completion"]), gaps
    assert gaps[""] < gaps["one lane"], gaps


def test_without_parallel_encodes_one_encoder_has_all_pictures_of_a_request() -> None:
    def encoders(*, parallel: bool) -> int:
        tiny = replace(QUICK, requests_of_load=(1, 1), simulations=Simulations())
        setup = Setup(tiny, "internvl2-26b", ("A100",), "epd-4", parallel_encodes=parallel).with_limits(9.0, 0.1)
        runs = setup.traced("3E1P1D", 1.0, "encoders", lambda deployment, _records: {"number": count(deployment)})
        return int(number_of(runs.more("number")))

    def count(deployment: Deployment) -> float:
        return sum(busy.vision > 0 for busy in deployment.busy().values())

    assert encoders(parallel=True) == 3 and encoders(parallel=False) == 1


# ---- what was measured


def test_measured_numbers_are_those_of_the_documents() -> None:
    def rows(name: str) -> dict[str, Any]:
        found = json.loads((ROOT / "bench" / "results" / f"{name}-llava-1.5-7b.json").read_text(encoding="utf-8"))
        return {row["what"].removeprefix("llava-1.5-7b "): row for row in found["rows"]}

    together = rows("h200/colocate") | rows("h200-first/colocate")
    named = {"2 pictures": "encode b=2", "8 pictures": "encode b=8", "prompt of 1024": "prefill S=1024"}
    for what, decodes, *shown in measured.TOGETHER[1].rows:
        row = together[f"{named[str(what)]} || decode B={decodes}, beside, two streams"]
        values = [row[name] for name in ("gain", "gain_bound", "decode_slowdown", "first_slowdown")]
        assert shown == [pytest.approx(value, rel=1e-3) for value in values], what
    steps = rows("h200/decode") | rows("h200/encode") | rows("h200/prefill")
    for step, graph_ms, eager_ms, times in measured.GRAPHS[1].rows:
        name, count = ("decode {} B={} KV=1024", str(step).split()[-1]) if "decode" in str(step) else ("", "")
        name, count = (name, count) if name else ("encode {} b={}", str(step).split()[0])
        pair = [1e3 * steps[name.format(how, count)]["seconds"]["median"] for how in ("graph", "eager")]
        assert [graph_ms, eager_ms, times] == [pytest.approx(v, rel=2e-3) for v in (*pair, pair[1] / pair[0])], step
    for batch, encodes, prefills, decodes in measured.ALONE[1].rows:
        if encodes is not None:
            assert encodes == pytest.approx(1 / steps[f"encode graph b={batch}"]["per_image_s"], rel=1e-3)
        if prefills is not None:
            assert prefills == pytest.approx(1 / steps[f"prefill b={batch} S=1024"]["seconds"]["median"], rel=1e-3)
        if decodes is not None:
            assert decodes == pytest.approx(steps[f"decode graph B={batch} KV=1024"]["tokens_per_s"], rel=2e-3)


def test_apart_stages_save_the_memory_that_the_paper_says() -> None:
    saved = column(epd.savings(), "E saves %")
    assert [saved[name] for name in epd.MODELS] == [pytest.approx(share, abs=1) for share in (95, 96.2, 78.3)]


# ---- the command


def test_the_command_lists_and_tells_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(EXPERIMENTS)
    file = tmp_path / "result.json"
    assert main(["reproduce", "heteroserve-t3", "--output", str(file)]) == 0
    told = capsys.readouterr().out
    assert "ratio, paper" in told and "the paper " in told
    stored = msgspec.json.decode(file.read_bytes(), type=Stored)
    assert stored.result == STORED["heteroserve-t3"].result


def test_what_needs_a_gpu_has_no_result_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "heteroserve-t7"]) == 0
    assert "to measure  python -m bench.serve ablation" in capsys.readouterr().out
    assert main(["reproduce", "heteroserve-t7", "--output", str(tmp_path / "x")]) != 0
    assert "no result here" in capsys.readouterr().err
    assert main(["reproduce", "heteroserve-t3", "--output", str(tmp_path)]) == 2
    assert "that is a folder" in capsys.readouterr().err
    assert main(["reproduce", "heteroserve-t9"]) != 0
    assert "did you mean heteroserve-t" in capsys.readouterr().err

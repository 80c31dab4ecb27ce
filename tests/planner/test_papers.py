"""The papers' experiments: all of them are there, closed forms have the papers' numbers where these add up, simulated
ones repeat themselves, and the page is that of the stored results."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from hydra_engine.__main__ import main
from hydra_engine.errors import ConfigError
from hydra_planner.commands.reproduce import stored_results
from hydra_planner.papers import epd, epd_serve, heteroserve, hydrainfer
from hydra_planner.papers.deployments import Setup, layout, num_devices
from hydra_planner.papers.experiments import EXPERIMENTS, find
from hydra_planner.papers.models import MODELS, spec_of
from hydra_planner.papers.page import DRAWN, PICTURES, page_text
from hydra_planner.papers.results import (
    FULL,
    QUICK,
    Cell,
    Result,
    Stored,
    Table,
    join_tables,
    shares_rows,
    table,
    tables_of,
    text_lines,
)

ROOT = Path(__file__).parents[2]
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
        else:
            assert experiment.run is None and (experiment.command or "docs/" in experiment.setting), experiment.name


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
        setup = Setup(epd_serve.MODEL, (epd_serve.ASCEND,), "sharegpt-4o", 16).with_limits(2.0, 0.05)
        point = setup.point(text, 12.0)
        return point.ttft.p50, point.tpot.p50

    together, apart, shared = run("EPD"), run("EP-D"), run("(E-D)-P")
    assert run("EPD") == together
    assert apart[1] < shared[1] < together[1], "decodes apart have nothing beside them, those beside encodes little"


def test_scales_thin_out_points_and_keep_the_ends() -> None:
    assert QUICK.some((1, 2, 3, 4, 5), 3) == (1, 3, 5) and FULL.some((1, 2, 3), 2) == (1, 2, 3)
    assert QUICK.some((1, 2, 3), 1) == (1,) and FULL.requests(10) == 40


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
    assert re.findall(r"^### ([a-z0-9-]+):", page, re.MULTILINE) == [experiment.name for experiment in EXPERIMENTS]
    assert set(re.findall(rf"\]\({PICTURES}/(.*)\.svg\)", page)) == set(DRAWN)
    assert all((ROOT / "docs" / PICTURES / f"{name}.svg").is_file() for name in DRAWN)
    assert "No result is stored." not in page and "No result is stored." in page_text({})


# ---- the command


def test_the_command_lists_and_tells_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(EXPERIMENTS)
    file = tmp_path / "result.json"
    assert main(["reproduce", "heteroserve-t3", "--output", str(file)]) == 0
    told = capsys.readouterr().out
    assert "ratio, paper" in told and "the paper " in told
    stored = msgspec.json.decode(file.read_bytes(), type=Stored)
    assert stored == STORED["heteroserve-t3"]


def test_what_needs_a_gpu_has_no_result_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "heteroserve-t7"]) == 0
    assert "to measure  python -m bench.serve ablation" in capsys.readouterr().out
    assert main(["reproduce", "heteroserve-t7", "--output", str(tmp_path / "x")]) != 0
    assert "no result here" in capsys.readouterr().err
    assert main(["reproduce", "heteroserve-t3", "--output", str(tmp_path)]) == 2
    assert "that is a folder" in capsys.readouterr().err
    assert main(["reproduce", "heteroserve-t9"]) != 0
    assert "did you mean heteroserve-t" in capsys.readouterr().err

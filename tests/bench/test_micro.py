"""The micro-benchmarks as processes on a tiny model: what documents hold, and that ratios follow from the inputs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.micro import ceilings, decode, subject, together
from bench.micro.colocate import options, sharings
from bench.micro.floors import Ceilings, Rates, Work, overlap_s, serial_s
from bench.micro.harness import OVERLAP, Effort, Report, Seconds, agree, in_turn, parse, require, scaled, timed
from bench.micro.profile import Launch, gaps_of, kernels_of
from bench.micro.side_by_side import MIN_FIRSTS, Duo
from bench.micro.steps import Step
from bench.micro.subject import Sharing, _sharing, run_together
from bench.summary import table
from hydra_engine.backend.cpu.device import CpuDevice, WholeDevice
from hydra_engine.backend.select import resolve_dtype

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def document_of(name: str, path: Path, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "hydra_engine", "bench", name, "--quick", "--threads", "1", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--json", str(path), *flags], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads(path.read_text())
    assert (found["bench"], found["suite"], found["mode"]) == (name, "micro", "quick")
    assert not found["wrong"] and not found["failed"] and found["complete"] and found["rows"]
    assert {"cpu", "torch", "triton", "commit", "command", "threads", "device"} <= set(found["card"])
    return found


def recomputed(row: dict[str, Any], ceilings: dict[str, Any]) -> float:
    """The floor, from what the document says alone."""
    work = [Work(**part) for part in row["work"]]
    names = ("gemm_flops_per_s", "read_bytes_per_s", "copy_bytes_per_s")
    rates = Rates(*(ceilings[name] for name in names))
    return overlap_s(work, rates) if row["formula"] == OVERLAP else serial_s(work, rates)


def check_rows(document: dict[str, Any]) -> None:
    for row in document["rows"]:
        seconds = row["seconds"]
        assert 0 < seconds["p5"] <= seconds["median"] <= seconds["p95"] and seconds["turns"] > 0
        assert row["floor_s"] == pytest.approx(recomputed(row, document["ceilings"]))
        assert row["of_floor"] == pytest.approx(row["floor_s"] / seconds["median"])
        for name, ratio in row["over_peers"].items():
            assert ratio == pytest.approx(row["peers"][name]["median"] / seconds["median"])


@pytest.mark.slow
def test_decodes_next_to_transformers_and_torch(tmp_path: Path) -> None:
    document = document_of("decode", tmp_path / "decode.json", "--rows", "1,3", "--contexts", "40")
    check_rows(document)
    assert [row["what"] for row in document["rows"]] == ["demo decode eager B=1 KV=40", "demo decode eager B=3 KV=40"]
    assert [row["inputs"] for row in document["rows"]] == [
        {"rows": rows, "context": 40, "how": "eager"} for rows in (1, 3)
    ]
    assert all(set(row["peers"]) == {"transformers", "torch"} for row in document["rows"])


@pytest.mark.slow
def test_encodes_and_prompts_beside_decodes(tmp_path: Path) -> None:
    sizes = ("--rows", "2", "--context", "40", "--prompt", "24", "--seconds", "0.2")
    document = document_of("colocate", tmp_path / "colocate.json", *sizes)
    check_rows(document)
    beside, pair, *_ = document["rows"]
    assert beside["what"] == "demo encode b=1 || decode B=2, beside, two streams"
    assert pair["what"] == "demo encode b=1 || decode B=2, pair, two streams" and pair["formula"] == OVERLAP
    assert pair["serial_over_pair"] > 0 and "gain" not in pair, "a pair says how unequal both are"
    ran, alone = beside["inputs"], beside["alone_s"]
    assert ran["whole_s"] >= 0.2 and ran["firsts"] >= 3 and ran["steps"] > 0
    rates = [ran[count] * alone[name]["median"] for count, name in (("firsts", "first"), ("steps", "decode"))]
    assert beside["gain"] == pytest.approx(sum(rates) / ran["whole_s"])
    assert beside["gain"] == pytest.approx(1 / beside["first_slowdown"] + 1 / beside["decode_slowdown"])
    if beside["share_of_best"] is not None:
        assert beside["share_of_best"] == pytest.approx((1 - 1 / beside["gain"]) / (1 - 1 / beside["gain_best"]))
    assert document["rows"][-1]["what"].endswith("one batch")


def arguments(*flags: str) -> argparse.Namespace:
    return parse(None, argv=["--device", "cpu", *flags])


def test_timing_takes_turns_and_divides() -> None:
    calls: list[str] = []
    times = timed(CPU, {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, Effort(3, 0.0, 1.0))
    assert calls == ["a", "a", "b", "b", *"ababab"] and times["a"].turns == 3
    assert scaled({"x": Seconds(4.0, 2.0, 8.0, 5)}, 4) == {"x": Seconds(1.0, 0.5, 2.0, 5)}
    assert Seconds.of([3.0, 1.0, 2.0]) == Seconds(2.0, 1.0, 3.0, 3)
    seen: list[int] = []
    turn = in_turn(seen.append, 2)
    for _ in range(3):
        turn()
    assert seen == [0, 1, 0]


def test_a_wrong_result_is_not_timed_and_ends_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, ones = tmp_path / "out.json", torch.ones(8)
    report = Report("x", arguments("--json", str(path)), Ceilings(1e9, 1e9, 1e9))
    with pytest.raises(SystemExit, match="2 results were wrong"), report:
        for name, result in (("close", ones * 1.01), ("far", ones * 1.1), ("nan", ones * float("nan"))):
            with report.case(name):
                agree(name, result, ones)
                report.row(name, Seconds(1.0, 1.0, 1.0, 1), work=[Work("w", 5e8, 1e8)], floor=None)
    document = json.loads(path.read_text())
    assert [row["what"] for row in document["rows"]] == ["close"] and document["rows"][0]["of_floor"] == 0.5
    assert [wrong["what"] for wrong in document["wrong"]] == ["far", "nan"]
    assert "NOT TIMED" in capsys.readouterr().out


def test_a_case_that_fails_takes_no_row_with_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    report = Report("x", arguments("--json", str(path)))
    with pytest.raises(SystemExit, match="0 results were wrong, 2 cases failed"), report:
        with report.case("first"):
            report.row("first", Seconds(1.0, 1.0, 1.0, 1))
        assert [row["what"] for row in json.loads(path.read_text())["rows"]] == ["first"]
        with report.case("second"):
            raise RuntimeError("no kernel for\nthis size")
        with report.case("third"):
            with report.optional("a peer"):
                raise KeyError("gone")
            report.row("third", Seconds(1.0, 1.0, 1.0, 1))
    document = json.loads(path.read_text())
    assert [row["what"] for row in document["rows"]] == ["first", "third"] and document["complete"]
    assert document["failed"] == [
        {"what": "second", "reason": "RuntimeError: no kernel for this size"},
        {"what": "a peer", "reason": "KeyError: 'gone'"},
    ]
    said = capsys.readouterr()
    assert "FAILED: RuntimeError: no kernel for this size" in said.out and "Traceback" in said.err


def test_what_ends_a_benchmark_leaves_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with pytest.raises(ZeroDivisionError), Report("x", arguments("--json", str(path))) as report:
        report.row("first", Seconds(1.0, 1.0, 1.0, 1))
        raise ZeroDivisionError("by zero")
    document = json.loads(path.read_text())
    assert [row["what"] for row in document["rows"]] == ["first"] and not document["complete"]
    assert document["failed"] == [{"what": "the rest", "reason": "ZeroDivisionError: by zero"}]
    text = table.table([table.document_of("out", document)])
    assert "Failed: the rest: ZeroDivisionError: by zero" in text and "ended before its last row" in text


def test_a_wrong_peer_is_a_wrong_result_of_its_case() -> None:
    report = Report("x", arguments())
    with report.case("case"):
        with report.optional("a peer"):
            agree("a peer", torch.ones(3), torch.zeros(3))
        report.row("case", Seconds(1.0, 1.0, 1.0, 1))
    assert [wrong["what"] for wrong in report.document()["wrong"]] == ["case"] and not report.document()["rows"]


def test_a_shape_that_does_not_fit_is_wrong() -> None:
    report = Report("x", arguments())
    with report.case("shape"):
        agree("shape", torch.ones(3), torch.ones(4))
    with report.case("fine"):
        require(True, "nothing")
    assert [wrong["what"] for wrong in report.document()["wrong"]] == ["shape"]


@pytest.mark.parametrize("partition", [0, 2])
def test_work_is_held_on_the_partition_that_is_measured(partition: int) -> None:
    """The whole device too: lanes of one that is divided would move to a part of it."""
    asked: list[int] = []

    class Divided(WholeDevice):
        def use(self, partition: int) -> nullcontext[None]:
            asked.append(partition)
            return nullcontext()

    device = CpuDevice(1)
    device.partitions = Divided()
    lanes = device.lane("vision"), device.lane("language")
    Duo(device, *lanes, lambda: None, lambda: None, partition).together(Effort(1, 0.0, 1.0))
    for lane in lanes:
        lane.close()
    assert asked == [partition] * 4


def test_a_device_that_cannot_be_divided_is_measured_whole() -> None:
    report = Report("x", arguments())
    model, sharing = _sharing(report, "demo", parse(None, argv=["--device", "cpu"]), Sharing(split=(32,)))
    assert sharing == Sharing() and model.name == "demo"
    (skipped,) = report.document()["skipped"]
    assert skipped["what"] == "demo on parts of the device" and "sm_split" in skipped["reason"]


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--device", "cuda:0"], [Sharing("equal", (64,))]),
        (["--device", "cuda:0", "--full"], [Sharing("equal", (32, 64, 96))]),
        (["--device", "cuda:0", "--splits", "0"], [Sharing("equal")]),
        (
            ["--device", "cuda:0", "--splits", "32,48", "--priority", "equal,language"],
            [Sharing("equal", (32, 48)), Sharing("language")],
        ),
        (["--device", "cuda:0", "--priority", "language"], [Sharing("language", (64,))]),
        (["--device", "cpu", "--priority", "language"], [Sharing()]),
    ],
)
def test_a_gpu_is_shared_by_streams_and_in_parts_unless_told_otherwise(flags: list[str], wanted: list[Sharing]) -> None:
    assert sharings(parse(None, options, flags)) == wanted


def test_a_priority_that_there_is_not_is_refused() -> None:
    with pytest.raises(SystemExit, match="there are equal, language, not 'vision'"):
        sharings(parse(None, options, ["--device", "cuda:0", "--priority", "vision"]))


@pytest.mark.parametrize(
    ("form", "contexts", "named"),
    [
        ("", [1024] * 5, "1024"),
        (decode.ONE_LONG, [8192, 512, 512, 512, 512], "512 but one of 8192"),
        (decode.SPREAD, [64, 544, 1024, 1504, 1984], "64 to 1984"),
    ],
)
def test_contexts_that_differ_have_blocks_of_their_own(form: str, contexts: list[int], named: str) -> None:
    language = SimpleNamespace(max_position=8192, vocab_size=100, rope_sections=None)
    model: Any = SimpleNamespace(name="m", device=CPU, spec=SimpleNamespace(language=language))
    case = decode.Case(5, 1024, form)
    assert case.contexts(model) == contexts and case.what(model, "graph") == f"m decode graph B=5 KV={named}"
    language.max_position = 1500
    assert max(case.contexts(model)) <= 1500
    language.max_position = 8192
    rows, blocks = case.requests(model), sum(-(-context // 16) for context in contexts)
    cache: Any = SimpleNamespace(num_blocks=blocks)
    step = Step(model, rows, cache)
    used = [step.tables[row, : -(-context // 16)].tolist() for row, context in enumerate(contexts)]
    assert sorted(block for blocks in used for block in blocks) == list(range(blocks)), "each block has one request"
    last = [(context - 1) % 16 + 16 * used[row][-1] for row, context in enumerate(contexts)]
    assert step.slots.tolist() == last and step.num_context.tolist() == contexts
    cache.num_blocks -= 1
    with pytest.raises(AssertionError, match="blocks of its own"):
        Step(model, rows, cache)


def test_two_lanes_run_at_once() -> None:
    """The two works wait for each other inside, so they come to an end only if they run together."""
    device = CpuDevice(1)
    vision, language, met = device.lane("vision"), device.lane("language"), threading.Barrier(2)
    try:
        found = Duo(device, vision, language, lambda: met.wait(10), lambda: met.wait(10)).together(Effort(2, 0.0, 1.0))
        assert found.whole.turns == 2 and found.whole.median >= max(found.first.median, found.second.median)
        steps = threading.Semaphore(0)

        def one_more_step() -> None:
            while steps.acquire(blocking=False):
                pass
            assert steps.acquire(timeout=30)

        beside = Duo(device, vision, language, one_more_step, steps.release).beside(0.01)
        assert beside.num_firsts >= MIN_FIRSTS and beside.whole_s >= 0.01 and beside.num_steps > 0
        assert beside.first_s * beside.num_firsts == pytest.approx(beside.whole_s)
        broken = Duo(device, vision, language, lambda: 1 // 0, lambda: None)
        with pytest.raises(ZeroDivisionError):  # and the steps end
            broken.beside(0.01)
    finally:
        vision.close()
        language.close()


def test_flags_of_several_benchmarks_go_to_those_that_know_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen: dict[str, argparse.Namespace] = {}

    def run(benches: dict[str, tuple[argparse.Namespace, Any]], model: str | None) -> list[str]:
        seen.update({name: arguments for name, (arguments, _) in benches.items()})
        return []

    monkeypatch.setattr(subject, "run_together", run)
    common = ["decode,profile", "--model", "demo", "--dir", str(tmp_path), "--no-peers", "--device", "cpu", "--quick"]
    flags = ["--rows", "1,8,24", "--uneven", "--served-width", "--repeat", "3", "--prompt", "0"]
    assert together.main([*common, *flags]) == 0
    assert seen["decode"].rows == seen["profile"].rows == "1,8,24"
    assert (seen["decode"].uneven, seen["decode"].served_width, seen["decode"].repeat) == (True, True, 3)
    assert seen["profile"].prompt == 0 and not hasattr(seen["profile"], "repeat")
    with pytest.raises(SystemExit):
        together.main([*common, "--repeat", "3", "--tokens", "676"])
    assert "none of decode, profile knows --tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_several_benchmarks_of_one_model_draw_its_weights_once(tmp_path: Path) -> None:
    """The run takes the ceilings of a document, if it is of their dtype; a benchmark that crashed is not begun
    again."""
    measured, (dtype, _) = tmp_path / "ceilings.json", resolve_dtype("auto", "bfloat16")
    document_of("ceilings", measured, "--dtype", str(dtype).removeprefix("torch."))
    flags = ["--model", "demo", "--dir", str(tmp_path), "--prefix", "x-", "--no-peers", "--device", "cpu"]
    command = [sys.executable, "-m", "bench.micro.together", "decode,profile", *flags, "--threads", "1", "--resume"]
    command += ["--ceilings", str(measured)]
    (tmp_path / "x-decode-demo.json").write_text("begun")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x-decode-demo.json").read_text() == "begun"
    document = json.loads((tmp_path / "x-profile-demo.json").read_text())
    known = json.loads(measured.read_text())
    assert document["complete"] and document["ceilings"] == known["ceilings"] and known["dtype"] == str(dtype)
    assert [row["what"] for row in document["rows"]] == [
        "demo decode B=1 KV=256",
        "demo decode B=4 KV=256",
        "demo prefill S=128",
        "demo encode b=1",
    ]
    for row in document["rows"]:
        kernels = row["kernels"]
        assert kernels == sorted(kernels, key=lambda kernel: -kernel["us"]) and row["launches"] >= len(kernels) > 3
        assert sum(kernel["share"] for kernel in kernels) == pytest.approx(1, abs=1e-3)
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0 and again.stdout == "nothing is left to run\n"


def test_ceilings_of_another_device_or_of_half_a_run_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, fresh = Ceilings(1.0, 2.0, 3.0), Ceilings(4.0, 5.0, 6.0)
    monkeypatch.setattr(ceilings, "Machine", lambda *_: None)
    monkeypatch.setattr(ceilings, "_measure", lambda *_, through_rings: (fresh, {}))
    document = {"ceilings": known.as_dict(), "dtype": "torch.bfloat16", "complete": True, "card": {"device": "cpu"}}
    path = tmp_path / "ceilings.json"

    def found(**changes: Any) -> Ceilings:
        path.write_text(json.dumps(document | changes))
        return ceilings.measure(CPU, torch.bfloat16, quick=True, known=path)

    assert found() == known
    assert found(complete=False) == found(dtype="torch.float32") == found(card={"device": "cuda:0"}) == fresh
    path.write_text("{")
    assert ceilings.measure(CPU, torch.bfloat16, quick=True, known=path) == fresh
    assert ceilings.measure(CPU, torch.bfloat16, quick=True, known=tmp_path / "none.json") == fresh


def test_kernels_are_added_up_by_name_and_gaps_are_between_neighbours() -> None:
    launches = [Launch("a", 0.0, 2.0), Launch("b", 3.0, 6.0), Launch("a", 9.5, 2.0), Launch("b", 11.0, 6.0)]
    assert kernels_of(launches, 2) == [
        {"name": "b", "count": 1.0, "us": 6.0, "share": 0.75},
        {"name": "a", "count": 1.0, "us": 2.0, "share": 0.25},
    ]
    assert gaps_of(launches) == {"median": 0.5, "p95": 1.0} and gaps_of(launches[:1]) == {}
    assert kernels_of([], 2) == []


@pytest.mark.slow
def test_a_benchmark_that_fails_takes_nothing_from_the_next_over_one_model(tmp_path: Path) -> None:
    """The document of each says that it had begun, also where a process ends at once."""
    seen: list[tuple[str, bool]] = []

    def job(flags: argparse.Namespace, report: Report, backend: Any) -> None:
        seen.append((flags.json.stem, json.loads(flags.json.read_text())["complete"]))
        if flags.json.stem == "first":
            raise ZeroDivisionError("by zero")
        report.row("a row", Seconds(1.0, 1.0, 1.0, 1))

    known = tmp_path / "known.json"
    card = {"device": "cpu"}
    rates = Ceilings(1.0, 2.0, 3.0).as_dict()
    known.write_text(json.dumps({"ceilings": rates, "dtype": "torch.bfloat16", "complete": True, "card": card}))
    paths = {name: tmp_path / f"{name}.json" for name in ("first", "second")}
    common = ("--threads", "1", "--ceilings", str(known), "--json")
    benches = {name: (arguments(*common, str(path)), job) for name, path in paths.items()}
    assert run_together(benches, None) == ["first: by zero"]
    assert seen == [("first", False), ("second", False)]
    assert [json.loads(path.read_text())["complete"] for path in paths.values()] == [False, True]

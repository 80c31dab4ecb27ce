"""Answers to the questions of the decisive call from its documents; each of its commands exists."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu_check.answers import attention_share, lines
from bench.gpu_check.commands import CEILINGS, LLAVA, QWEN, TWIN, Setup
from bench.gpu_check.decide import CHANGED, QUESTIONS, decisive
from bench.gpu_check.machine import Machine
from bench.micro import profile, subject, together
from bench.micro.harness import parse
from bench.serve import __main__ as serve
from bench.serve import harness
from bench.serve.options import settings_from
from hydra_planner.records import Record
from hydra_terminal.load.loops import Run

ROOT = Path(__file__).parents[2]
HOPPER = Machine("", "a GPU", "90", "/usr/bin/nvcc")


def row(what: str, seconds: float = 0.001, inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    timed = {"median": seconds, "p5": seconds, "p95": seconds}
    return {"what": what, "seconds": timed, "inputs": inputs or {}, "peers": {}, **more}


def write(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"rows": rows}))


def answered(folder: Path) -> dict[str, str]:
    """Part -> what was measured."""
    return dict(zip(QUESTIONS, (line.split("**")[1] for line in lines(folder)), strict=True))


def test_without_documents_every_question_stands_unanswered(tmp_path: Path) -> None:
    (tmp_path / "ring.json").write_text('{"rows": [')
    assert set(answered(tmp_path).values()) == {"not measured"}
    assert all(QUESTIONS[part].means in line for part, line in zip(QUESTIONS, lines(tmp_path), strict=True))


@pytest.mark.parametrize(("rate", "follows"), [(2700.0, "build it"), (2300.0, "between both"), (1900.0, "drop it")])
def test_the_rate_of_48_multiprocessors_decides_what_is_built(tmp_path: Path, rate: float, follows: str) -> None:
    others = [
        row("read", inputs={"sms": 48, "held_kib": 96}, gb_per_s=1.0),
        row("read", inputs={"sms": 64}, gb_per_s=2),
    ]
    write(tmp_path, "ring", [*others, row("read", inputs={"sms": 48, "held_kib": 192}, gb_per_s=rate)])
    assert answered(tmp_path)["ring"] == f"{rate / 1e3:.2f} TB/s: {follows}"


def test_documents_answer_with_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    layers = [row("LLaVA B=1 layer", 12e-6, parts_s=7e-6), row("LLaVA B=8 layer", 22e-6, parts_s=13e-6)]
    write(tmp_path, "layer", [row("LLaVA B=1 o + add", 3e-6), *layers])
    write(tmp_path, "products", [row("fc1 + silu", 1e-3, peers={"product": {"median": 9e-4}}, activation_s=9e-5)])
    decode = row("attention GQA B=64 KV=1024", of_floor=0.64, of_sustained_floor=0.7, over_peers={"flashinfer": 0.8})
    write(tmp_path, "attn_decode", [decode])
    prompt, rates = "prompts MHA 32:32x128 S=1024 b=1 blocks of", {"triton": 250.2, "flashinfer": 310.0}
    towers = [f"tower Qwen2-VL 16x80 {use}, 4096 rows" for use in ("pictures", "captured pictures")]
    whats = f"{prompt} 64", f"{prompt} 16", *towers
    write(tmp_path, "attn_prefill", [row(what, 4e-3, tflops=rates) for what in whats])
    eight = {"rows": 8, "how": "graph"}
    decodes = [
        row(f"{LLAVA} decode graph B=1 KV=1024", 4e-3, {"rows": 1, "how": "graph"}, spread=0.11, of_floor=0.7),
        row(f"{LLAVA} decode graph B=8 KV=1024", 5e-3, eight, of_floor=0.8),
        row(f"{LLAVA} decode graph B=8 KV=512 but one of 8192", 9e-3, {**eight, "contexts": [512, 8192]}, of_floor=0.4),
        row(f"{LLAVA} decode graph B=8 KV=1024, tables of 4096", 6e-3, {**eight, "how": "graph, served width"}),
    ]
    write(tmp_path, f"decode-{LLAVA}", decodes)
    write(tmp_path, f"encode-{QWEN}", [row(f"{QWEN} encode eager b=1", 0.02), row(f"{QWEN} encode graph b=1", 0.0121)])
    kernels = [{"name": "_packed_kernel", "share": 0.4}, {"name": "nvjet_sm90_tst", "share": 0.5}]
    write(tmp_path, f"profile-{TWIN}", [row(f"{TWIN} encode b=1", 0.0174, kernels=kernels)])
    prompts = [("", 0.02), (" graph", 0.0164), (", 0.5 s of rest", 0.021), (" graph, 0.5 s of rest", 0.015)]
    reads = [(4e-4, 48, False), (3e-4, 48, True), (2e-4, 96, False)]
    write(tmp_path, CEILINGS, [row("read on", s, {"sms": sms, "spread": spread}) for s, sms, spread in reads])
    about = {"rows": 1, "tokens": 676}
    write(tmp_path, f"prefill-{LLAVA}", [row(f"{LLAVA} prefill b=1 S=676{how}", s, about) for how, s in prompts])
    what = f"{LLAVA} encode b=4 || decode B=64, beside, 64 SMs for decodes"
    write(tmp_path, f"colocate-{LLAVA}", [row(what, gain=1.24, gain_best=1.4), row(f"{LLAVA} pair", gain=9)])
    found = answered(tmp_path)
    assert (
        found["layer"] == "LLaVA B=1: 12.0 us, its kernels alone 7.0; LLaVA B=8: 22.0 us, its kernels alone 13.0, seams"
    )
    assert found["products"] == "fc1 + silu: 10.0% of the product"
    assert (
        found["attn_decode"]
        == "GQA B=64 KV=1024 0.64 of its floor, 0.70 of the sustained one; FlashInfer 1.25 times as fast"
    )
    assert found["attn_prefill"] == (
        "MHA 32:32x128 S=1024 b=1: triton 250, flashinfer 310 TFLOP/s; "
        "tower Qwen2-VL 16x80 captured pictures, 4096 rows: triton 250, flashinfer 310 TFLOP/s"
    )
    assert found[LLAVA] == (
        "B=1 4.00 ms, 11.0% apart; B=8 5.00 ms, 0.80 of its floor; one long context of them 0.40 of its floor; "
        "served table 1.20 times as long"
    )
    assert found[QWEN] == "encode 12.1 ms" and found[TWIN] == "17.4 ms, attention 40% of its kernels"
    assert found["prefill"] == "676 tokens 20.0 ms, as a graph 16.4; rested 15.0"
    assert found["colocate"] == "encode b=4 || decode B=64, 64 SMs for decodes 1.24 of 1.40"
    assert found[CEILINGS] == "spread over contiguous, reads, by multiprocessors: 48: 1.33"
    assert found["serve"] == "not measured"


def test_a_server_answers_with_its_first_token_alone_and_its_best_rate(tmp_path: Path) -> None:
    rates = ((8.0, None), (24.0, 31.2), (27.0, 30.9))
    points = [{"requests_per_s": rate, "steady_requests_per_s": steady} for rate, steady in rates]
    servers = {"ours": {"alone": {"ttft_ms": {"p50": 24.06}}, "points": points}, "int8": {"points": points[:1]}}
    (tmp_path / f"serve-{LLAVA}.json").write_text(json.dumps({"results": {"curve": {"servers": servers}}}))
    assert (
        answered(tmp_path)["serve"] == "ours: TTFT alone 24.1 ms, at most 31.2 requests/s; int8: at most 8.0 requests/s"
    )


def test_an_answer_that_cannot_be_read_takes_nothing_from_the_others(tmp_path: Path) -> None:
    """Rows lack a figure, figures are null, documents are none: what ends the answers would end the call."""
    write(tmp_path, "ring", [row("read", inputs={"sms": 48, "held_kib": 192}, gb_per_s=2700.0)])
    write(tmp_path, "products", [row("fc1 + silu", activation_s=1e-4)])
    write(tmp_path, "layer", [row("LLaVA B=1 layer", parts_s=None)])
    (tmp_path / f"profile-{TWIN}.json").write_text('["nothing"]')
    servers = {"ours": {"alone": {"ttft_ms": {"p50": None}}, "points": []}, "int8": {"points": [{"rate": 8.0}]}}
    (tmp_path / f"serve-{LLAVA}.json").write_text(json.dumps({"results": {"curve": {"servers": servers}}}))
    found = answered(tmp_path)
    assert found["ring"] == "2.70 TB/s: build it" and found[TWIN] == "not measured"
    assert found["products"] == "not to be read from its document: KeyError 'product'"
    assert all(found[part].startswith("not to be read from its document: ") for part in ("layer", "serve"))


@pytest.mark.parametrize(("model", "share"), [("llava-1.5-7b", 0.197), ("qwen2.5-vl-7b", 0.075)])
def test_attention_is_found_among_the_kernels_that_a_device_has_named(model: str, share: float) -> None:
    document = json.loads((ROOT / "bench" / "results" / "h200-first" / f"profile-{model}.json").read_text())
    (encode,) = [row for row in document["rows"] if "encode" in row["what"]]
    assert attention_share(encode) == pytest.approx(share, abs=1e-3)


def test_every_word_of_the_changed_tests_names_some() -> None:
    """The steps of this engine that no device has run are among them."""
    sources = sorted((ROOT / "tests" / "gpu").rglob("*.py"))
    names = [f"{path.stem}::{name}" for path in sources for name in re.findall(r"def (test_\w+)", path.read_text())]
    chosen = {word: [name for name in names if word in name] for word in CHANGED.split(" or ")}
    assert all(chosen.values()), chosen
    taken = {name.partition("::")[2] for found in chosen.values() for name in found}
    assert taken >= {
        "test_graphs_change_no_token",
        "test_replayed_encodes_change_no_token",
        "test_a_plan_of_mixed_rows_reads_what_is_there_when_it_is_used",
        "test_keys_and_values_of_int8",
        "test_parts_of_all_partitions_nest",
    }


def test_a_server_that_is_cut_has_answered_with_what_it_was_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The end of the time comes in the second load of the first server."""
    (part,) = [part for part in decisive(Setup(tmp_path, HOPPER, 16)) if part.name.startswith("serve")]
    settings = settings_from(part.command[3:], None)
    record = Record(
        0, "text", planned_s=0.0, sent_s=0.0, end_s=0.5, wanted_tokens=2, stamps=(0.025, 0.1), counts=(1, 1)
    )
    loads = iter([Run((record,), 1.0, 0.0, False), Run((record,) * 4, 1.0, 0.0, False)])

    def load(*arguments: object) -> Run:
        try:
            return next(loads)
        except StopIteration:
            raise SystemExit(143) from None

    monkeypatch.setattr(harness, "closed_loop", load)
    monkeypatch.setattr(harness, "open_loop", load)
    monkeypatch.setattr(harness.Harness, "serving", lambda self, server: SimpleNamespace(name=server.name))
    with pytest.raises(SystemExit):
        serve.measure(settings)
    said = "hydra-engine: TTFT alone 25.0 ms, at most 8.0 requests/s; ended before its last load"
    assert answered(tmp_path)["serve"] == said


def test_every_command_of_the_call_is_taken_by_what_it_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Asks each benchmark's own parser: a flag that it does not know would end the part on the device."""
    parts = decisive(Setup(tmp_path, HOPPER, 16))
    assert sum(part.planned_s for part in parts) == 456
    begins = [part.name for part in parts if not part.name.startswith(("build", "tests"))]
    assert all(any(name.startswith(part) for name in begins) for part in QUESTIONS), "each question has a part"
    monkeypatch.setattr(profile, "prepare", lambda device: None)
    for part in parts:
        module, *flags = part.command[part.command.index("-m") + 1 :] if "-m" in part.command else ("",)
        if module == "bench.serve":
            settings = settings_from(flags, None)
            assert settings.alone == 20 and settings.workload.text_share == 0, "a request on paper has a picture"
            assert [server.name for server in settings.servers] == ["hydra-engine", "int8"]
        elif module == "bench.micro.together":
            taken: dict[str, Any] = {}

            def begin(benches: dict[str, Any], model: str, taken: dict[str, Any] = taken) -> list[str]:
                taken |= benches
                return []

            monkeypatch.setattr(subject, "run_together", begin)
            assert together.main(flags) == 0 and [*taken] == flags[0].split(",")
        elif module.startswith("bench.micro."):
            bench = importlib.import_module(module)
            given = parse(bench.__doc__, getattr(bench, "options", None), flags)
            assert given.json.parent == tmp_path

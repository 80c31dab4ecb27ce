"""The micro-benchmarks as they run on a GPU, from their flags to their documents, at tiny sizes on an emulated device:
what they capture can be captured, and what they compare agrees. No time is measured."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.gpu_check.answers import lines
from bench.gpu_check.commands import CEILINGS, LLAVA, QWEN, TWIN
from bench.gpu_check.decide import QUESTIONS
from bench.micro import (
    attn_decode,
    attn_prefill,
    ceilings,
    decode,
    harness,
    migrate,
    probe_kernels,
    products,
    profile,
    quantized,
    ring,
    ring_reader,
)
from bench.micro.ceilings import Sizes
from bench.micro.harness import Effort
from hydra_engine.backend.cuda import attention
from hydra_engine.backend.cuda.attention_choice import Tower
from hydra_engine.backend.cuda.device import CudaDevice
from hydra_kernels import decode_attention
from tests.emulated.conftest import Models
from tests.emulated.cuda import Torch
from tests.emulated.kernels import CHANGED, REFERENCES, Launches, kernel
from tests.emulated.streams import Event, Streams

Run = Callable[..., dict[str, Any]]


def _ring_read(words: Tensor, num_sms: int, held_kib: int) -> Tensor:
    sums = torch.zeros(num_sms * ring_reader.WARPS, dtype=torch.int64)
    sums[0] = words.sum(dtype=torch.int64)
    return sums.to(torch.int32)  # which wraps as words do


class Reader:
    """The library: nothing of it is launched."""

    max_bytes = 227 << 10  # of shared memory
    max_blocks = 8

    def ring_read(self, device: int, words: int, num_bytes: int, blocks: int, *ring: int) -> bytes | None:
        stages, piece_bytes, sums, _ = ring
        assert device == 0 and num_bytes and stages and 1 <= blocks <= self.max_blocks
        assert words % 16 == sums % 4 == num_bytes % 16 == piece_bytes % 16 == 0
        return b"too much" if 4 * stages * piece_bytes > self.max_bytes else None


def _dependent_add(x: Tensor) -> tuple[()]:
    x.add_(1.0)
    return ()


@pytest.fixture
def run(streams: Streams, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Calls `main` of a benchmark; its document."""
    elapsed = Event.elapsed_time
    monkeypatch.setattr(Event, "elapsed_time", lambda self, end: elapsed(self, end) + 1e3)  # one call is a turn
    monkeypatch.setattr(harness, "QUICK", Effort(1, 0.0, 1.0))
    monkeypatch.setattr(ceilings, "_GPU", Sizes((64, 64, 64), 1 << 14, 0.0))
    monkeypatch.setitem(REFERENCES, "ring_read", _ring_read)
    monkeypatch.setitem(REFERENCES, "dependent_add", _dependent_add)
    monkeypatch.setitem(CHANGED, "dependent_add", (0,))
    monkeypatch.setattr(probe_kernels, "dependent_add_kernel", Launches("dependent_add"))
    monkeypatch.setattr(probe_kernels, "dependent_add", kernel(probe_kernels.dependent_add))
    monkeypatch.setattr(ring_reader, "library", lambda device: Reader())
    read = kernel(ring_reader.ring_read)
    for module in (ring_reader, ceilings, ring):
        monkeypatch.setattr(module, "ring_read", read)

    def call(name: str, *flags: str, failed: int | None = 0, written: str = "") -> dict[str, Any]:
        bench = importlib.import_module(f"bench.micro.{name}")
        for module in [module for name, module in [*sys.modules.items()] if name.startswith("bench.")]:
            if hasattr(module, "torch"):
                monkeypatch.setattr(module, "torch", Torch(streams))
        path = tmp_path / f"{written or name}.json"
        monkeypatch.setattr(sys, "argv", [name, "--device", "cuda:0", "--threads", "1", "--json", str(path), *flags])
        with suppress(SystemExit):  # something failed
            bench.main()
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        assert failed in (None, len(document["failed"])) and not document["wrong"] and document["complete"]
        return document

    return call


@pytest.fixture(params=["llava", "qwen2_vl", "qwen2_5_vl"])
def model(request: pytest.FixtureRequest, models: Models, tmp_path: Path) -> str:
    """A model directory without weights, as on a machine that has none."""
    without = shutil.ignore_patterns("*.safetensors")
    return str(shutil.copytree(models(request.param), tmp_path / "tiny", ignore=without))


def peers(document: dict[str, Any]) -> set[str]:
    return {name for row in document["rows"] for name in row["peers"]}


def whats(document: dict[str, Any]) -> list[str]:
    return [row["what"] for row in document["rows"]]


@pytest.mark.quick
def test_decode_attention(run: Run) -> None:
    document = run("attn_decode", "--shape", "4,2,16", "--rows", "2", "--contexts", "24", "--uneven")
    assert whats(document) == [f"attention GQA 4:2x16 B=2 KV={seen}" for seen in ("24", "12 but one of 192")]
    even, uneven = document["rows"]
    assert set(even["peers"]) == {"sdpa", "gather + sdpa"} and not uneven["peers"]
    assert even["work"][0]["read_bytes"] * (192 + 12) == uneven["work"][0]["read_bytes"] * 48
    assert {each["reason"] for each in document["skipped"]} == {"takes head dims of 64, 128 or 256, the model's is 16"}


@pytest.mark.slow
def test_prompts_and_towers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries every candidate; torch's do not run on this device, which the document says."""
    monkeypatch.setattr(attn_prefill, "SHAPES", {"GQA": (4, 2, 64)})
    tower = attn_prefill.Layers(Tower(2, 80, 24, 8), 4, 28)
    monkeypatch.setattr(attn_prefill, "TOWERS", {"tiny": tower})
    document = run("attn_prefill", "--lengths", "32", "--tokens", "64", failed=6)
    assert len(whats(document)) == 4 + 4 and peers(document) == {"triton-tma"}
    prompts = [f"prompts GQA 4:2x64 S=32 b={rows} blocks of {block}" for rows in (1, 2) for block in (16, 64)]
    assert whats(document)[:4] == prompts
    for row in document["rows"]:
        assert row["work"][0]["flops"] > 0 and row["fastest"] in row["tflops"]
    skipped = {row["what"] for row in document["skipped"]}
    assert {
        "prompts GQA 4:2x64 S=32 b=2 blocks of 16, triton-tma",
        "FlashAttention-4 for prompts and towers",
    } <= skipped


@pytest.mark.quick
def test_a_layer_kernel_by_kernel(run: Run) -> None:
    document = run("layer", "--shape", "4,2,16,40", "--rows", "2")
    kernels = ["add + norm", "norm + qkv + rope + write", "attention", "o + add", "norm + gate_up + act", "down + add"]
    kernels.append("layer")
    assert whats(document) == [f"any B=2 {kernel}" for kernel in kernels]
    assert peers(document) == {"ops", "begun when the last has ended"}
    alone = {row["what"]: row["seconds"]["median"] for row in document["rows"][:-1]}
    assert document["rows"][-1]["parts_s"] == pytest.approx(sum(alone.values()) - 2 * alone["any B=2 add + norm"])
    assert [skipped["reason"] for skipped in document["skipped"]] == ["not built"]


@pytest.mark.slow
def test_products_and_what_follows_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [each._replace(num_out=each.num_out // 64, num_in=64, rows=(20,)) for each in products.PRODUCTS[2:4]]
    monkeypatch.setattr(products, "PRODUCTS", tuple(few))
    document = run("products")
    assert whats(document) == [
        "tower of Qwen2.5-VL gate/up 20 x 106 x 64 + silu",
        "tower of Qwen2-VL fc1 20 x 80 x 64 + quick_gelu",
    ]
    assert peers(document) == {"product"} and "not built" in document["skipped"][0]["reason"]
    for row in document["rows"]:
        assert row["activation_s"] == row["seconds"]["median"] - row["peers"]["product"]["median"]


@pytest.mark.slow
def test_a_peer_that_cannot_be_captured_takes_nothing_with_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa = attn_decode.Paged.sdpa

    def waiting(self: attn_decode.Paged, keys: Tensor, values: Tensor, rows: slice = slice(None)) -> Tensor:
        if values.is_contiguous():
            keys.sum().item()
        return sdpa(self, keys, values, rows)

    monkeypatch.setattr(attn_decode.Paged, "sdpa", waiting)
    document = run("attn_decode", "--shape", "4,2,16", "--rows", "2", "--contexts", "24", failed=1)
    assert len(document["rows"]) == 1 and peers(document) == {"gather + sdpa"}


@pytest.mark.slow
def test_ceilings_of_the_device_and_of_its_parts(run: Run, monkeypatch: pytest.MonkeyPatch, streams: Streams) -> None:
    monkeypatch.setattr(ceilings, "_SM_STEP", 2)
    document = run("ceilings", "--full")
    assert whats(document)[4:7] == [f"read, {held} KB in flight" for held in (48, 96, 192)]
    assert whats(document)[7:10] == ["launch", "graph", "graph, dependent launch"] and not document["skipped"]
    assert whats(document)[10:] == [
        f"{what} on {count} of 8 SMs{form}"
        for count in (2, 4, 6)
        for form in ("", ceilings.SPREAD)
        for what in ("gemm", "read")
    ]
    assert not streams.findings, "parts read what the device has written before"


def test_reads_through_a_ring(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    document = run("ring", "--gib", "0.0001")
    held = (48, 96, 192)
    assert whats(document) == [f"read with {kib} KB in flight on {n} of 8 SMs" for kib in held for n in (1, 8)]
    for row in document["rows"]:
        rate = 4 * (int(0.0001 * (1 << 30)) // 16 * 4) / row["seconds"]["median"] / 1e9
        assert row["gb_per_s"] == pytest.approx(rate)
        assert row["gb_per_s_sm"] == pytest.approx(rate / row["inputs"]["sms"])

    few = Reader()
    few.max_bytes = 100 << 10
    monkeypatch.setattr(ring_reader, "library", lambda device: few)
    document = run("ring", "--gib", "0.0001")
    assert len(document["rows"]) == 4 and document["skipped"][0]["reason"].endswith("1 multiprocessors: too much")

    def refused(device: torch.device) -> None:
        raise ring_reader.NoReader("there is no nvcc")

    monkeypatch.setattr(ring_reader, "library", refused)
    document = run("ring", "--gib", "0.0001")
    assert not document["rows"] and document["skipped"][0]["reason"] == "there is no nvcc"
    document = run("ceilings")
    assert whats(document)[2:4] == ["read, sum", "read, sum of int64"] and whats(document)[4] == "launch"
    assert document["skipped"][0]["reason"] == "there is no nvcc; torch's sum reads instead"


@pytest.mark.slow
def test_writes_to_caches(run: Run) -> None:
    document = run("cache_write", "--shape", "4,2,16", "--tokens", "1,5")
    assert len(document["rows"]) == 4 and peers(document) == {"torch"}


@pytest.mark.slow
def test_quantised_products(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "SHAPES", ((192, 128),))
    document = run("quantized", "--rows", "1,17,130")
    assert {row["inputs"]["rows"] for row in document["rows"]} == {1, 17, 130} and peers(document) == {"bfloat16"}


@pytest.mark.slow
def test_decode_steps(run: Run, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr(decode, "_SPARE_BYTES", 0)
    monkeypatch.setattr(decode, "_COMPARED", (decode.Case(2, 40),))
    document = run("decode", "--model", model, "--rows", "2,3", "--contexts", "40")
    assert whats(document) == [f"tiny decode {how} B={rows} KV=40" for rows in (2, 3) for how in ("graph", "eager")]
    assert peers(document) == {"transformers", "torch graph"}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen2_5_vl"], indirect=True)
def test_decodes_of_contexts_that_differ_with_tables_that_are_served(
    run: Run, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr(decode, "_SPARE_BYTES", 0)
    widths: list[tuple[int, ...]] = []
    plan = attention.CudaAttention.plan_decode

    def plan_decode(self: Any, num_context: Tensor, tables: Tensor) -> Any:
        widths.append(tuple(tables.shape))
        return plan(self, num_context, tables)

    monkeypatch.setattr(attention.CudaAttention, "plan_decode", plan_decode)
    flags = ("--no-peers", "--uneven", "--served-width", "--repeat", "3")
    document = run("decode", "--model", model, "--rows", "1,3", "--contexts", "32", *flags)
    most = document["rows"][1]["what"].split()[-1]
    kinds = ("graph", "graph, tables", "eager")
    assert [row["what"].split(" decode ")[1] for row in document["rows"]] == [
        f"{kind.split(',')[0]} B={rows} KV={context}{f', tables of {most}' if 'tables' in kind else ''}"
        for rows, contexts in ((1, ("32",)), (3, ("32", "16 but one of 256", "2 to 62")))
        for context in contexts
        for kind in kinds
        if kind != "eager" or context == "32"
    ]
    for row in document["rows"]:
        one = row["inputs"]["rows"] == 1
        assert len(row.get("repeats_s", ())) == (3 if one else 0)
        if one:
            assert row["spread"] == pytest.approx(row["repeats_s"][2] / row["repeats_s"][0] - 1)
            assert row["seconds"]["median"] == row["repeats_s"][1]
    uneven = [row for row in document["rows"] if "contexts" in row["inputs"]]
    assert [row["inputs"]["mean_context"] for row in uneven[::2]] == [(256 + 2 * 16) / 3, 32]
    of_attention = {row["inputs"]["mean_context"]: row["work"][2]["read_bytes"] for row in uneven}
    assert of_attention[96] == 3 * of_attention[32], "floors are of what all contexts together have"
    served = -(-int(most) // 16)
    assert widths == [(1, 2), (1, served)] * 3 + [(3, 2), (3, served), (3, 16), (3, served), (3, 4), (3, served)]


RESTS = ("", ", 0.001 s of rest")


@pytest.mark.slow
def test_prefills(run: Run, model: str) -> None:
    document = run("prefill", "--model", model, "--rows", "2", "--tokens", "20", "--graph", "--idle", "0.001")
    assert whats(document) == [f"tiny prefill b=2 S=20{how}{rest}" for rest in RESTS for how in ("", " graph")]
    assert peers(document) == {"transformers", "without rest"}
    # As the engine captures it: 64 tokens for 40, 8 rows for 2.
    assert [row["inputs"].get("graph") for row in document["rows"]] == [None, [64, 8]] * 2
    assert all(row["tokens_per_s"] * row["seconds"]["median"] == pytest.approx(40) for row in document["rows"])


@pytest.mark.slow
def test_encodes(run: Run, model: str) -> None:
    document = run("encode", "--model", model, "--counts", "2", "--picture", "56x56")
    assert whats(document) == ["tiny encode graph b=2", "tiny encode eager b=2"] and peers(document) == {"transformers"}


@pytest.mark.slow
def test_encodes_and_prompts_beside_decodes(run: Run, model: str) -> None:
    sizes = ("--counts", "1", "--rows", "2", "--context", "24", "--prompt", "20", "--picture", "56x56", "--splits", "4")
    document = run("colocate", "--model", model, *sizes, "--seconds", "0.01")
    forms = ["equal priority", "4 SMs for decodes"]
    modes = [*(f"beside, {form}" for form in forms), *(f"pair, {form}" for form in forms)]
    works = "encode b=1", "prefill S=20"
    assert whats(document) == [
        *(f"tiny {work} || decode B=2, {mode}" for work in works for mode in modes),
        "tiny prefill S=20 with decode B=2, one batch",
    ]
    assert {row["inputs"].get("encode") for row in document["rows"][:4]} == {"graph"}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llava"], indirect=True)
def test_streams_of_both_priorities_beside_each_other(run: Run, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    asked: list[tuple[str, int]] = []
    make = CudaDevice.lane

    def lane(self: CudaDevice, name: str) -> Any:
        asked.append((name, self._priorities.get(name, 0)))
        return make(self, name)

    monkeypatch.setattr(CudaDevice, "lane", lane)
    sizes = ("--counts", "1", "--rows", "2", "--context", "24", "--prompt", "0", "--picture", "56x56", "--splits", "0")
    flags = ("--beside-only", "--seconds", "0.01", "--priority", "equal,language")
    document = run("colocate", "--model", model, *sizes, *flags)
    forms = ["equal priority", "language first"]
    assert whats(document) == [f"tiny encode b=1 || decode B=2, beside, {form}" for form in forms]
    assert asked == [("vision", 0), ("language", 0), ("vision", 0), ("language", -1)]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llava"], indirect=True)
def test_decodes_whose_sums_have_another_order_on_a_part_of_the_device_are_right(
    run: Run, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Fewer multiprocessors mean fewer splits, and random layers enlarge the difference that this makes."""
    # Not the function that keeps what it has said, here or with other numbers.
    monkeypatch.setattr(attention, "choose_num_splits", decode_attention.choose_num_splits.__wrapped__)
    monkeypatch.setattr(decode_attention, "_MIN_KEYS", 1)
    attend, seen = attention.decode_attention, set()

    def noisy(*rows: Any, num_splits: int, out: Tensor, **options: Any) -> None:
        seen.add(num_splits)
        attend(*rows, num_splits=num_splits, out=out, **options)
        out.mul_(1 + 0.015 * num_splits)

    monkeypatch.setattr(attention, "decode_attention", noisy)
    sizes = ("--counts", "1", "--rows", "2", "--context", "24", "--prompt", "0", "--picture", "56x56", "--splits", "2")
    document = run("colocate", "--model", model, *sizes, "--seconds", "0.01")
    assert seen == {2, 4} and "tiny encode b=1 || decode B=2, beside, 2 SMs for decodes" in whats(document)


@pytest.mark.slow
def test_blocks_that_move(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "REQUESTS", (migrate.Moved("KV", (2, 2, 4, 2, 16), 3),))
    monkeypatch.setattr(migrate, "between_processes", lambda report, threads: None)  # in the host's memory
    monkeypatch.setattr(migrate, "over_ipc", lambda report: None)  # with a process that has no emulated device
    document = run("migrate")
    assert [what.split()[0] for what in whats(document)] == ["copy", "through"]
    assert peers(document) == {"indexing", "per block", "to the host", "from the host"}


@pytest.mark.slow
def test_profiles_and_several_of_one_model(run: Run, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """The kernels themselves nobody sees here, which the documents say."""
    monkeypatch.setattr(profile, "launches_of", lambda run, device, calls: [run() for _ in range(calls)] and [])
    sizes = ("--rows", "2", "--context", "24", "--prompt", "20", "--picture", "56x56")
    document = run("profile", "--model", model, *sizes)
    assert whats(document) == ["tiny decode B=2 KV=24", "tiny prefill S=20", "tiny encode b=1"]
    assert [row["inputs"]["how"] for row in document["rows"]] == ["graph", "eager", "graph"]
    assert len(document["skipped"]) == 3 and all("saw none" in skipped["reason"] for skipped in document["skipped"])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llava"], indirect=True)
def test_documents_of_its_benchmarks_answer_the_questions_of_the_decisive_call(
    run: Run, monkeypatch: pytest.MonkeyPatch, model: str, tmp_path: Path
) -> None:
    """`bench.serve` is in tests/bench."""
    monkeypatch.setattr(Reader, "max_blocks", 48)
    monkeypatch.setattr(ring, "counts_of", lambda total: [48])
    run("ring", "--gib", "0.0001")
    run("ceilings", written=CEILINGS)
    run("layer", "--shape", "4,2,16,40", "--rows", "1")
    run("attn_decode", "--shape", "4,2,16", "--rows", "64", "--contexts", "24", "--uneven")
    monkeypatch.setattr(attn_prefill, "SHAPES", {"MHA": (2, 2, 64)})
    monkeypatch.setattr(attn_prefill, "TOWERS", {"Qwen2-VL": attn_prefill.Layers(Tower(2, 80, 24, 0), 4, 0)})
    run("attn_prefill", "--lengths", "1024", "--prompts", "1", failed=None)
    few = products.PRODUCTS[3]._replace(num_out=80, num_in=64, rows=(20,))
    monkeypatch.setattr(products, "PRODUCTS", (few,))
    run("products")
    monkeypatch.setattr(decode, "_SPARE_BYTES", 0)
    flags = ("--contexts", "32", "--no-peers", "--uneven", "--served-width", "--repeat", "3")
    run("decode", "--model", model, "--rows", "1,8,64", *flags, written=f"decode-{LLAVA}")
    run("decode", "--model", model, "--rows", "8", "--contexts", "32", "--no-peers", written=f"decode-{QWEN}")
    pictures = ("--model", model, "--picture", "56x56")
    run("encode", *pictures, "--counts", "1", "--no-peers", written=f"encode-{QWEN}")
    kernels = [profile.Launch("_packed_kernel", 0.0, 4.0), profile.Launch("nvjet_sm90", 4.0, 6.0)]
    monkeypatch.setattr(profile, "launches_of", lambda run, device, calls: kernels)
    run("profile", *pictures, "--rows", "2", "--context", "24", "--prompt", "0", written=f"profile-{TWIN}")
    config = json.loads((Path(model) / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 1024
    (Path(model) / "config.json").write_text(json.dumps(config))
    prompts = ("--tokens", "676,1024", "--graph", "--idle", "0.001", "--no-peers")
    run("prefill", "--model", model, *prompts, written=f"prefill-{LLAVA}")
    sizes = ("--rows", "2", "--context", "24", "--counts", "1", "--prompt", "20", "--splits", "4")
    flags = ("--beside-only", "--seconds", "0.01", "--priority", "equal,language")
    run("colocate", *pictures, *sizes, *flags, written=f"colocate-{LLAVA}")
    found = dict(zip(QUESTIONS, (line.split("**")[1] for line in lines(tmp_path)), strict=True))
    assert [part for part, answer in found.items() if answer.startswith("not ")] == ["serve"], found
    assert found[LLAVA].startswith("B=1 ") and " apart; B=8 " in found[LLAVA] and "; B=64 " in found[LLAVA]
    assert found[LLAVA].count("one long context") == found[LLAVA].count("served table") == 2
    assert "40% of its kernels" in found[TWIN] and found[QWEN].count("; ") == 1
    assert [text.rpartition(": ")[0] for text in found["attn_prefill"].split("; ")] == [
        "MHA 2:2x64 S=1024 b=1",
        "tower Qwen2-VL 2x80 captured pictures, 48 rows",
    ]
    assert found["prefill"].count("as a graph") == found["prefill"].count("rested") == 2
    assert found["colocate"].count(" of ") == 6

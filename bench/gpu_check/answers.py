"""Answers of the decisive call from its documents: the figure that each question asks for, and what follows.

Thresholds are those of `decide.QUESTIONS`. A document that is not there, or lacks the row, answers nothing; one that
cannot be read says why, and takes nothing from the other answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu_check.commands import CEILINGS, LLAVA, QWEN, TWIN
from bench.gpu_check.decide import QUESTIONS

Row = Mapping[str, Any]

SEAMS_US = 8.0
# Of kernels that attend in a tower: ours, torch's and FlashInfer's, cuDNN's. "_packed" is not "packed" of products.
ATTENTION = ("_packed_kernel", "packed_tma_kernel", "flash", "fmha", "sdpa", "attention")


class Documents:
    """The documents of a folder, by the names that benchmarks give them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> Mapping[str, Any]:
        """The document, empty where it is not there."""
        try:
            found = json.loads((self._folder / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def rows(self, name: str, *words: str) -> list[Row]:
        """The rows whose `what` has all of the words."""
        return [row for row in self.read(name).get("rows", ()) if all(word in row["what"] for word in words)]


def lines(folder: Path) -> list[str]:
    """Lines of each question with its measurement and the meaning of answers."""
    documents = Documents(folder)
    return [
        f"{part}: {question.asks}? **{_answer(part, documents)}** ({question.means})"
        for part, question in QUESTIONS.items()
    ]


def _answer(part: str, documents: Documents) -> str:
    try:
        return _ANSWERS[part](documents) or "not measured"
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:  # a row that lacks a figure
        return f"not to be read from its document: {type(error).__name__} {error}"


def _ms(row: Row) -> float:
    return float(row["seconds"]["median"]) * 1e3


def _of(rows: Sequence[Row], **inputs: Any) -> Row | None:
    """The first with these inputs."""
    return next((row for row in rows if all(row["inputs"].get(name) == value for name, value in inputs.items())), None)


def _ring(documents: Documents) -> str:
    row = _of(documents.rows("ring"), sms=48, held_kib=192)
    if row is None:
        return ""
    rate = row["gb_per_s"] / 1e3
    follows = "build it" if rate >= 2.6 else "drop it" if rate < 2.0 else "between both"
    return f"{rate:.2f} TB/s: {follows}"


def _ceilings(documents: Documents) -> str:
    rows = documents.rows(CEILINGS, "read on")
    pairs = []
    for row in rows:
        spread = _of(rows, sms=row["inputs"].get("sms"), spread=True)
        if not row["inputs"].get("spread") and spread is not None:
            pairs.append(f"{row['inputs']['sms']}: {_ms(row) / _ms(spread):.2f}")
    return f"spread over contiguous, reads, by multiprocessors: {', '.join(pairs)}" if pairs else ""


def _layer(documents: Documents) -> str:
    found = []
    for row in documents.rows("layer", " layer"):
        us, alone_us, shape = 1e3 * _ms(row), 1e6 * row["parts_s"], row["what"].removesuffix(" layer")
        follows = ", seams" if us - alone_us > SEAMS_US else ""
        found.append(f"{shape}: {us:.1f} us, its kernels alone {alone_us:.1f}{follows}")
    return "; ".join(found)


def _of_floors(row: Row) -> str:
    """The row's time over its floor, and over the floor at sustained clocks where that was measured."""
    sustained = f", {row['of_sustained_floor']:.2f} of the sustained one" if "of_sustained_floor" in row else ""
    return f"{row['of_floor']:.2f} of its floor{sustained}"


def _decode(documents: Documents) -> str:
    rows, found = documents.rows(f"decode-{LLAVA}"), []
    one = next((row for row in rows if "spread" in row and row["inputs"].get("how") == "graph"), None)
    if one is not None:
        found.append(f"B=1 {_ms(one):.2f} ms, {one['spread']:.1%} apart")
    for count in (8, 64):
        graphs = [row for row in rows if row["inputs"].get("rows") == count]
        even = next((r for r in graphs if r["inputs"].get("how") == "graph" and "contexts" not in r["inputs"]), None)
        long = next((r for r in graphs if r["inputs"].get("how") == "graph" and " but one of " in r["what"]), None)
        wide = next((r for r in graphs if "tables of" in r["what"] and "contexts" not in r["inputs"]), None)
        if even is not None:
            found.append(f"B={count} {_ms(even):.2f} ms, {_of_floors(even)}")
            found += [f"one long context of them {_of_floors(long)}"] if long is not None else []
            found += [f"served table {_ms(wide) / _ms(even):.2f} times as long"] if wide is not None else []
    return "; ".join(found)


def _qwen(documents: Documents) -> str:
    encodes = documents.rows(f"encode-{QWEN}", "graph b=1") or documents.rows(f"encode-{QWEN}", "b=1")
    decodes = documents.rows(f"decode-{QWEN}", "graph B=8 ")
    found = [f"encode {_ms(encodes[0]):.1f} ms"] if encodes else []
    return "; ".join([*found, *(f"B=8 {_of_floors(row)}" for row in decodes[:1])])


def _twin(documents: Documents) -> str:
    for row in documents.rows(f"profile-{TWIN}", "encode"):
        if row["kernels"]:
            return f"{_ms(row):.1f} ms, attention {attention_share(row):.0%} of its kernels"
    return ""


def attention_share(row: Row) -> float:
    """The part of the time of a profile's kernels that attention has."""
    return sum(kernel["share"] for kernel in row["kernels"] if any(word in kernel["name"] for word in ATTENTION))


def _decodes(documents: Documents) -> str:
    found = []
    for row in documents.rows("attn_decode", "B=64"):
        peer = row["over_peers"].get("flashinfer")
        found.append(f"{row['what'].removeprefix('attention ')} {_of_floors(row)}")
        found += [f"FlashInfer {1 / peer:.2f} times as fast"] if peer else []
    return "; ".join(found)


def _attention(documents: Documents) -> str:
    prompts = documents.rows("attn_prefill", "prompts", "S=1024 b=1 ", "blocks of 16")
    towers = documents.rows("attn_prefill", "tower Qwen2-VL", "captured pictures")
    found = []
    for row in (*prompts, *towers):
        what = row["what"].removeprefix("prompts ").removesuffix(" blocks of 16")
        found.append(f"{what}: {', '.join(f'{name} {rate:.0f}' for name, rate in row['tflops'].items())} TFLOP/s")
    return "; ".join(found)


def _products(documents: Documents) -> str:
    found = []
    for row in documents.rows("products"):
        product_s = row["peers"]["product"]["median"]
        found.append(f"{row['what']}: {row['activation_s'] / product_s:.1%} of the product")
    return "; ".join(found)


def _prefill(documents: Documents) -> str:
    found = []
    for tokens in (676, 1024):
        rows = documents.rows(f"prefill-{LLAVA}", f"S={tokens}")
        eager, graph = _of(rows, tokens=tokens), next((row for row in rows if row["what"].endswith(" graph")), None)
        if eager is not None and graph is not None:
            found.append(f"{tokens} tokens {_ms(eager):.1f} ms, as a graph {_ms(graph):.1f}")
            rested = next((row for row in rows if " graph, " in row["what"] and row["what"].endswith("rest")), None)
            found += [f"rested {_ms(rested):.1f}"] if rested is not None else []
    return "; ".join(found)


def _colocate(documents: Documents) -> str:
    found = []
    for row in documents.rows(f"colocate-{LLAVA}", "beside"):
        short = row["what"].removeprefix(f"{LLAVA} ").replace(", beside, ", ", ")
        found.append(f"{short} {row['gain']:.2f} of {row['gain_best']:.2f}")
    return "; ".join(found)


def _serve(documents: Documents) -> str:
    document = documents.read(f"serve-{LLAVA}")
    results = document.get("results", {}).get("curve", {}).get("servers", {})
    found = []
    for name, server in results.items():
        alone_ms = server.get("alone", {}).get("ttft_ms", {}).get("p50")  # None where all requests failed
        said = [] if alone_ms is None else [f"TTFT alone {alone_ms:.1f} ms"]
        if rates := [point["steady_requests_per_s"] or point["requests_per_s"] for point in server["points"]]:
            said.append(f"at most {max(rates):.1f} requests/s")
        found.append(f"{name}: {', '.join(said) or 'nothing was answered'}")
    if not document.get("complete", True):
        found.append("ended before its last load")
    return "; ".join(found)


_ANSWERS: dict[str, Callable[[Documents], str]] = {
    "ring": _ring,
    CEILINGS: _ceilings,
    "layer": _layer,
    LLAVA: _decode,
    QWEN: _qwen,
    TWIN: _twin,
    "attn_decode": _decodes,
    "attn_prefill": _attention,
    "products": _products,
    "prefill": _prefill,
    "colocate": _colocate,
    "serve": _serve,
}

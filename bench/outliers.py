"""Error of quantised products on a processor where activations have outlier channels, against the same weights
dequantised. In the demo model one channel behind each norm is made 2^k times as large, and the weights that read it
2^k times as small, which is the same function. Mean KL divergences of the logits in nats, over questions and answers:
the unquantised model to the engine and to the dequantised weights, and the dequantised weights to the engine.

Then what outliers cost: ms of products of one thread, rows of x plain and with six outlier channels.

    python -m bench.outliers [--kinds int8,gptq-8] [--powers 0,5,6,8]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.accuracy import Subject, folder_of
from bench.common import card, emit
from hydra_engine import _C, Engine
from hydra_engine.backend.base import Backend, PackedLinear
from hydra_engine.backend.cpu.linear import linear, pack_linear
from hydra_engine.backend.cpu.ops import NativeOps
from hydra_engine.backend.quantized import QuantizedWeight, quantized
from hydra_engine.backend.select import create_backend
from tests.models.quantized.written import METHODS, write_checkpoint

QUESTIONS = (
    *("What is two plus three?", "Hello!", "What is seven minus two?", "Who are you?"),
    *("Count from one to five.", "What colour is the sky?"),
)
AT_LOAD = ("int8", "int4")
KINDS = (*AT_LOAD, "gptq-8", "gptq-4", "w8-packed", "w8-packed-zeros", "w4-128", "w4-channel", "w8a8", "awq")
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
_READERS = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "gate", "up"))
_CHANNEL = 7
_SHAPES = ((9728, 896), (896, 4864))
_PRODUCTS = {"int8": (8, None), "8 bits, groups of 128": (8, 128), "4 bits, groups of 128": (4, 128), "int4": (4, 32)}


class DequantizedOps(NativeOps):
    """Products with the tensors that quantised weights stand for."""

    @staticmethod
    def pack_linear(
        weight: Tensor | QuantizedWeight, bias: Tensor | None = None, rows: torch.dtype | None = None
    ) -> PackedLinear:
        if isinstance(weight, QuantizedWeight):
            weight = weight.dequantized(torch.float32)
        return pack_linear(weight, bias, rows)


class Outliers:
    """The demo model with outliers of 2^power, in `folder`."""

    def __init__(self, folder: Path, power: int, requests: Sequence[Tensor]) -> None:
        self.plain, self.requests = folder / f"plain-{power}", requests
        self._folder, self._power = folder, power
        self._backend = create_backend("cpu", torch.float32, threads=1)
        write_outliers(self.plain, power)
        self.expected = self._logits(self.plain, self._backend)

    def divergences(self, kind: str) -> dict[str, float]:
        """Divergences of the engine from the unquantised model and from the dequantised weights."""
        where = self.plain
        if kind not in AT_LOAD:
            where = self._folder / f"{kind}-{self._power}"
            write_checkpoint(self.plain, where, METHODS[kind])
        wish = kind if kind in AT_LOAD else "auto"
        engine = self._logits(where, self._backend, wish)
        dequantized = self._logits(where, replace(self._backend, ops=DequantizedOps()), wish)
        return {
            "engine": divergence(self.expected, engine),
            "dequantised": divergence(self.expected, dequantized),
            "between": divergence(dequantized, engine),
        }

    def _logits(self, where: Path, backend: Backend, wish: str = "auto") -> Tensor:
        subject = Subject(where, backend, wish)
        return torch.cat([subject.logits(request) for request in self.requests])


def write_outliers(folder: Path, power: int) -> None:
    shutil.copytree(folder_of("demo"), folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "vision" in name:
            continue
        if name.endswith(_NORMS):
            tensor[_CHANNEL] *= 2**power
        elif name.endswith(_READERS):
            tensor[:, _CHANNEL] /= 2**power
    save_file(tensors, path, metadata={"format": "pt"})


def divergence(right: Tensor, found: Tensor) -> float:
    """Mean KL(right || found) of logits [T, V]."""
    log_p, log_q = right.double().log_softmax(-1), found.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def conversations() -> list[Tensor]:
    """Token ids of questions with the model's own answers."""
    with Engine("demo", max_num_seqs=4, kv_cache_gib=0.05, progress=False, log_level="error") as engine:
        answers = [engine.generate(question, max_tokens=24, temperature=0.0) for question in QUESTIONS]
    return [torch.tensor([*answer.prompt_token_ids, *answer.token_ids]) for answer in answers]


def products(rows: Sequence[int], seconds: float) -> Iterator[dict[str, Any]]:
    _C.set_num_threads(1)
    for num_out, num_in in _SHAPES:
        for kind, (num_bits, group) in _PRODUCTS.items():
            wide = torch.randn(num_out, num_in) * num_in**-0.5
            weight = pack_linear(quantized(wide, num_bits, group or num_in, torch.bfloat16))
            for count in rows:
                x = torch.randn(count, num_in)
                outliers = x.clone()
                outliers[:, :: num_in // 6] *= 64
                inputs = {"plain": x.bfloat16(), "outliers": outliers.bfloat16()}
                best = dict.fromkeys(inputs, float("inf"))
                end = time.perf_counter() + seconds
                while time.perf_counter() < end:  # in turns
                    for name, some in inputs.items():
                        begin = time.thread_time()
                        linear(some, weight)
                        best[name] = min(best[name], time.thread_time() - begin)
                yield {"product": f"{num_out} x {num_in}", "weight": kind, "rows": count, **best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS), help="int8, int4 and names of tests/models/quantized")
    parser.add_argument("--powers", default="0,3,5,6,8", help="k, with commas")
    parser.add_argument("--rows", default="1,16,128", help="of x, in products")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each product")
    arguments = parser.parse_args()
    requests, rows, speeds = conversations(), list[dict[str, Any]](), list[dict[str, Any]]()
    print(f"{'weights':16} {'outliers':>8} {'engine':>10} {'dequantised':>12} {'between':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for power in map(int, arguments.powers.split(",")):
            subject = Outliers(Path(folder), power, requests)
            for kind in arguments.kinds.split(","):
                found = subject.divergences(kind)
                rows.append({"weights": kind, "power": power, **found})
                print(f"{kind:16} {f'2^{power}':>8} {found['engine']:10.5f} {found['dequantised']:12.5f} ", end="")
                print(f"{found['between']:10.5f}", flush=True)
    print(f"{'product':14} {'weight':24} {'rows':>5} {'plain, ms':>10} {'outliers':>10}")
    for row in products([int(count) for count in arguments.rows.split(",") if count], arguments.seconds):
        speeds.append(row)
        print(f"{row['product']:14} {row['weight']:24} {row['rows']:5} ", end="")
        print(f"{1e3 * row['plain']:10.3f} {1e3 * row['outliers']:10.3f}", flush=True)
    emit({"bench": "outliers", **card(), "divergences": rows, "products": speeds})


if __name__ == "__main__":
    main()

"""Distance of a quantised decoder's logits: mean KL divergence from the unquantised model in nats, and how
often the most likely token is another one. Both read the same tokens, in requests of `--tokens`; all positions count.

A variant is int8 or int4, which the engine quantises to, or the folder or GGUF file of a model that another program
quantised, llama.cpp's llama-quantize for example, from the same weights.

    python -m bench.accuracy DIR int8 int4 DIR-Q4_K_M.gguf --text notes.txt
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common import card, emit
from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.backend.select import DTYPES, create_backend
from hydra_engine.config import EngineConfig
from hydra_engine.core.instances import Role
from hydra_engine.core.options import SpecOptions
from hydra_engine.models.build import load_model
from hydra_engine.models.layers.decoder import LanguageInput
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.models.vlm import VisionLanguageModel
from hydra_engine.preprocess.model_files import find_model_files
from hydra_engine.preprocess.text.tokenizer import load_tokenizer

_AT_LOAD = ("int8", "int4")
_BLOCK = 16


class Subject:
    """The decoder of one model, which gives the logits of whole requests."""

    def __init__(self, model_dir: Path, backend: Backend, quantization: str = "auto", held_on: str = "cpu") -> None:
        self._backend = backend
        self.spec = load_spec(model_dir, SpecOptions(quantization=quantization)).held_on(held_on)
        if self.spec.language.has_states:
            raise SystemExit("models with recurrent states are not measured here")
        model = load_model(model_dir, self.spec, backend, Role.P)
        assert isinstance(model, VisionLanguageModel)
        self._model = model

    @property
    def weights_bytes(self) -> int:
        return self._model.weights_bytes

    @torch.inference_mode()
    def logits(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, V] float32"""
        language, count = self.spec.language, token_ids.shape[0]
        blocks = -(-count // _BLOCK)
        shape = (blocks, language.num_kv_layers, 2, _BLOCK, language.num_kv_heads, language.head_dim)
        cache = PagedCache(torch.zeros(shape, dtype=self._backend.dtype))
        places = torch.arange(count)
        plan = self._backend.ops.plan_attention(
            torch.tensor([0, count], dtype=torch.int32),
            torch.tensor([count], dtype=torch.int32),
            torch.arange(blocks, dtype=torch.int32)[None],
        )
        positions = places if language.rope_sections is None else places.repeat(3, 1)
        batch = LanguageInput(token_ids, positions, places, plan, logit_rows=places, position_end=count)
        return self._model.forward(batch, cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of an unquantised model, or demo")
    parser.add_argument("variants", nargs="+", help="int8, int4, folders and GGUF files")
    parser.add_argument("--text", type=Path, help="UTF-8 file; default: random tokens")
    parser.add_argument("--tokens", type=int, default=256, help="of a request")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    arguments = parser.parse_args()
    backend = create_backend("cpu", DTYPES[arguments.dtype])
    folder = folder_of(arguments.model)
    base = Subject(folder, backend)
    requests = list(_requests(arguments, folder, base.spec.language.vocab_size))
    expected = [base.logits(request) for request in requests]
    print(f"{'weights':40} {'MiB':>8} {'mean KL':>10} {'p99 KL':>10} {'other token':>12}")
    rows: list[dict[str, Any]] = []
    for name in arguments.variants:
        at_load = name in _AT_LOAD
        subject = Subject(folder if at_load else folder_of(name), backend, name if at_load else "auto")
        rows.append({"weights": name, "bytes": subject.weights_bytes} | compared(subject, requests, expected))
        found = rows[-1]
        size = f"{found['bytes'] / (1 << 20):8.1f}"
        print(f"{name[-40:]:40} {size} {found['kl']:10.5f} {found['kl_p99']:10.4f} {found['other']:11.2%}", flush=True)
    emit({"bench": "accuracy", **card(), "model": arguments.model, "bytes": base.weights_bytes, "rows": rows})


def folder_of(model: str) -> Path:
    return find_model_files(EngineConfig(model=model)).model_path


def _requests(arguments: argparse.Namespace, folder: Path, vocab_size: int) -> Iterator[Tensor]:
    """[tokens] int64 each."""
    wanted = arguments.requests * arguments.tokens
    if arguments.text is None:
        token_ids = torch.randint(0, vocab_size, (wanted,), generator=torch.Generator().manual_seed(0))
    else:
        text = arguments.text.read_text(encoding="utf-8")
        token_ids = torch.tensor(load_tokenizer(folder).encode(text)[:wanted])
        if token_ids.shape[0] < arguments.tokens:
            raise SystemExit(f"--text: expected at least {arguments.tokens} tokens, got {token_ids.shape[0]}")
    return (part for part in token_ids.split(arguments.tokens) if part.shape[0] == arguments.tokens)


def compared(subject: Subject, requests: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """KL(unquantised || quantised) per position."""
    divergences, others = [], []
    for request, right in zip(requests, expected, strict=True):
        found = subject.logits(request)
        log_p, log_q = right.double().log_softmax(-1), found.double().log_softmax(-1)
        divergences.append((log_p.exp() * (log_p - log_q)).sum(-1))
        others.append(right.argmax(-1) != found.argmax(-1))
    every = torch.cat(divergences)
    return {
        "kl": float(every.mean()),
        "kl_p99": float(every.quantile(0.99)),
        "other": float(torch.cat(others).double().mean()),
    }


if __name__ == "__main__":
    main()

"""Engines with FlashInfer's attention beside engines with Triton's, where the package is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.miniatures import make_tiny

on_gpu = pytest.importorskip("tests.gpu.test_engine", exc_type=ImportError)

pytestmark = pytest.mark.cuda

# Log probabilities of these models in two orders of bfloat16 sums differ by up to 0.16; with the heads of a layer
# exchanged by 1.6 and more.
CLOSE = 0.4


def answers(model: Path, attention: str, **options: Any) -> list[Any]:
    sampling = {"logprobs": 2, "prompt_logprobs": 0}
    with on_gpu.engine_of(model, dtype="bfloat16", attention_backend=attention, **options) as engine:
        handles = [on_gpu.asked(engine, case, **sampling) for case in range(len(on_gpu.CASES))]
        return [handle.result(120) for handle in handles]


def check_agreement(expected: Sequence[Any], got: Sequence[Any]) -> None:
    """Compares prompts everywhere, answers up to the first other token, which has to have been nearly as probable."""
    for case, (ours, theirs) in enumerate(zip(expected, got, strict=True)):
        prompts = zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in prompts) < CLOSE, case
        same = on_gpu.shared_beginning(ours.token_ids, theirs.token_ids)
        for a, b in zip(ours.logprobs[:same], theirs.logprobs[:same], strict=True):
            assert abs(a.logprob - b.logprob) < CLOSE, case
        if same < len(ours.token_ids):
            first, second = ours.logprobs[same].top
            assert first.logprob - second.logprob < CLOSE, f"case {case}: token {same} is another one"


@pytest.mark.parametrize("form", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
@pytest.mark.parametrize("kv_heads", [4, 1], ids=["decode", "tensor cores"])
def test_tokens_are_tritons(cuda: torch.device, tmp_path: Path, kv_heads: int, form: dict[str, Any]) -> None:
    """Texts and pictures, in batches whose contexts differ."""
    pytest.importorskip("flashinfer", exc_type=ImportError)
    kernels: Any = pytest.importorskip("hydra_engine.backend.cuda.flashinfer_kernels")
    for kernel in (kernels.decode_kernel(4, kv_heads, 128), kernels.FA2):
        if lacking := kernels.installed().reason_missing(kernel, torch.bfloat16, 128):
            pytest.skip(f"FlashInfer's {lacking}")
    text = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": kv_heads}
    make_tiny("llava", tmp_path, seed=7, text=text)
    expected, got = (answers(tmp_path, backend, **form) for backend in ("triton", "flashinfer"))
    check_agreement(expected, got)

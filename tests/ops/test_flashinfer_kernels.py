"""Kernels that FlashInfer has, what is done without them, and packages that are refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.cuda import attention_timing, flashinfer_kernels
from hydra_engine.backend.cuda.attention import CudaAttention
from hydra_engine.backend.cuda.attention_choice import (
    DECODES,
    PROMPTS,
    Heads,
    Measured,
    choose_by_name,
    resolve_attention,
)
from hydra_engine.backend.cuda.flashinfer_attention import FlashInferAttention
from hydra_engine.backend.cuda.flashinfer_kernels import FlashKernel, FlashKernels
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_engine.cli import doctor
from hydra_engine.errors import BackendError, ConfigError
from tests.ops.flashinfer_library import NUM_SMS, install, send
from tests.ops.test_attention_timing import HEADS, SITE, timed
from tests.ops.test_flashinfer_parts import SCALE, ints, random_cache, step

DECODE_128 = (
    "batch_decode_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_head_dim_vo_128_"
    "posenc_0_use_swa_False_use_logits_cap_False"
)
FA2_128 = DECODE_128.replace("batch_decode", "batch_prefill") + "_f16qk_False_kv_stride_equal"
FA3_64 = FA2_128.replace("128", "64").replace("_kv_stride_equal", "_sm90")


def installation(folder: Path, *names: str, sources: bool = True) -> SimpleNamespace:
    """A package with the parts that are looked at."""
    for name in names:
        (folder / "aot" / name).mkdir(parents=True)
        (folder / "aot" / name / f"{name}.so").write_bytes(b"")
    if sources:
        (folder / "include").mkdir()
    env = SimpleNamespace(FLASHINFER_AOT_DIR=folder / "aot", FLASHINFER_INCLUDE_DIR=folder / "include")
    return SimpleNamespace(fast_decode_plan=None, jit=SimpleNamespace(env=env))


# ---- the choice


def choose(wanted: str, *, head_dim: int = 128, block_size: int = 16, **changes: Any) -> str:
    given: dict[str, Any] = {"on_gpu": True, "dtype": torch.bfloat16, "deterministic": False}
    return resolve_attention(wanted, **(given | {"heads": Heads(8, 4, head_dim, block_size)} | changes))


def test_auto_measures_where_there_is_something_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer need not be there: there are other candidates."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert choose("auto") == choose("auto", head_dim=80) == "auto" and choose("triton") == "triton"
    for wrong in ({"deterministic": True}, {"on_gpu": False}, {"dtype": torch.float32}):
        assert choose("auto", **wrong) == "triton"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"on_gpu": False}, "flashinfer runs on a GPU; set attention_backend to auto or device to cuda:0"),
        ({"dtype": torch.float32}, "computes in bfloat16 and float16, not in float32; set attention_backend to triton"),
        ({"head_dim": 72}, "takes head dims of 64, 128 or 256, the model's is 72"),
        ({"head_dim": 80}, "the model's is 80"),
        ({"block_size": 12}, "takes a block_size of 8, 16, 32, 64 or 128, not 12"),
        ({"deterministic": True}, "so it is not deterministic"),
    ],
)
def test_what_flashinfer_cannot_do_is_refused_with_the_reason(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        choose("flashinfer", **changes)
    assert refused.value.param == "attention_backend"


def test_flashinfer_is_refused_where_it_is_not_installed_or_cannot_compute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(BackendError, match="the package is not installed; `pip install -U flashinfer-python`"):
        choose("flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())
    with pytest.raises(BackendError, match=r"the package is older than 0\.4; `pip install"):
        choose("flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", installation(tmp_path, sources=False))
    with pytest.raises(
        BackendError, match=r"its kernel decode-128 for bfloat16 is not compiled, and its package has no"
    ):
        choose("flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", installation(tmp_path, DECODE_128, sources=False))
    with pytest.raises(BackendError, match=r"its kernel fa2-128 for bfloat16 is not compiled, .*`make gpu-wheels`"):
        choose("flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", installation(tmp_path, FA2_128, sources=False))
    assert choose("flashinfer") == "flashinfer"
    for wrong, said in (({"head_dim": 64}, "decode-64 for bfloat16"), ({"dtype": torch.float16}, "128 for float16")):
        with pytest.raises(BackendError, match=said):
            choose("flashinfer", **wrong)


# ---- kernels that are compiled ahead


def test_compiled_kernels_are_known_by_the_names_of_their_modules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    others = ("batch_mla_attention", DECODE_128.replace("swa_False", "swa_True"), FA2_128.replace("o_bf16", "o_f16"))
    library = installation(tmp_path, DECODE_128, FA2_128, *others, sources=False)
    library.jit.env.FLASHINFER_AOT_PROVIDERS = [SimpleNamespace(modules=frozenset({FA3_64}))]
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    kernels = flashinfer_kernels.installed()
    assert kernels.describe() == "decode-128, fa2-128, fa3-64"
    bf16 = torch.bfloat16
    assert not kernels.reason_missing("fa2", bf16, 128) and "no sources" in kernels.reason_missing("fa3", bf16, 128)
    asked = (("auto", 128), ("fa2", 128), ("fa3", 128), ("auto", 64), ("auto", 256))
    assert [kernels.prompts(name, bf16, dim, hopper=True) for name, dim in asked] == ["fa2", "fa2", None, "fa3", None]
    assert kernels.prompts("auto", bf16, 64, hopper=False) is None


def test_what_a_package_carries_is_known_without_importing_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A measurement is made again once there are others."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert flashinfer_kernels.describe_installed() == ""
    about = tmp_path / "flashinfer_python-0.7.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: flashinfer-python\nVersion: 0.7.2\n")
    installation(tmp_path / "flashinfer" / "data", FA2_128, sources=False)
    assert flashinfer_kernels.describe_installed() == "fa2-128; its package has no sources to compile more"
    installation(tmp_path / "flashinfer" / "data", DECODE_128, sources=False)
    assert flashinfer_kernels.describe_installed() == "decode-128, fa2-128; its package has no sources to compile more"


def test_a_package_with_sources_compiles_what_nvcc_and_ninja_are_there_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", installation(tmp_path))
    for name in ("CUDA_PATH", "FLASHINFER_NVCC", "FLASHINFER_DISABLE_JIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert flashinfer_kernels.installed().problem == "there is no nvcc to compile more"
    (tmp_path / "bin").mkdir()
    for name, said in (("nvcc", "there is no ninja on the path to compile more"), ("ninja", "")):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
        assert flashinfer_kernels.installed().problem == said
    assert flashinfer_kernels.installed().prompts("auto", torch.float16, 256, hopper=False) == "auto"
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert flashinfer_kernels.installed().problem == "FLASHINFER_DISABLE_JIT keeps it from compiling more"


class ByTriton(CudaAttention):
    """Says what it is asked for, and computes nothing."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), NUM_SMS, send, deterministic=False)
        self.asked: list[str] = []

    def decodes(self, *given: Any) -> None:
        self.asked.append("decodes")

    def prompts(self, *given: Any) -> None:
        self.asked.append("prompts")

    def paged(self, q: Tensor, *given: Any) -> Tensor:
        self.asked.append("all")
        return q

    def attend_packed(self, q: Tensor, *given: Any, tma: bool = False) -> Tensor:
        self.asked.append("packed")
        return q


@pytest.mark.parametrize(
    ("built", "heads", "planned", "asked"),
    [
        ("decode fa2", 2, ["Decode", "Prefill", "DecodeGraph", "Packed"], []),
        ("fa2", 2, ["Prefill", "Packed"], ["decodes", "all"]),
        ("fa2", 14, ["Decode", "Prefill", "DecodeGraph", "Packed"], []),
        ("decode", 2, ["Decode", "DecodeGraph"], ["prompts", "packed"]),
        ("decode", 14, [], ["all", "all", "packed"]),
        ("", 2, [], ["all", "all", "packed"]),
    ],
)
def test_rows_whose_kernel_is_not_there_are_tritons(
    monkeypatch: pytest.MonkeyPatch, built: str, heads: int, planned: list[str], asked: list[str]
) -> None:
    """Shapes: 2 query heads for 2 KV heads, where decodes take no tensor cores, and 14, where they take FA2."""
    known = frozenset(FlashKernel(name, torch.bfloat16, 64) for name in built.split())
    library = install(monkeypatch, kernels=FlashKernels(known, "its package has no sources to compile more"))
    by_triton = ByTriton()
    attention = FlashInferAttention(torch.device("cpu"), NUM_SMS, send, by_triton, library)
    cache, q = random_cache(), torch.randn(4, heads, 64).to(torch.bfloat16)
    attention.paged(q, cache, 0, attention.plan(*step([1, 3], [9, 11])), SCALE)
    captured = attention.plan_decode(*(torch.from_numpy(rows) for rows in (ints(9, 9), ints(*range(8)).reshape(2, 4))))
    assert captured.refresh is not None
    captured.refresh(ints(9, 9), ints(*range(8)).reshape(2, 4))
    attention.paged(q[:2], cache, 0, captured, SCALE)
    assert attention.supports_packed(q, [0, 1, 4]) == ("Packed" in planned)
    attention.attend_packed(q, q, q, [0, 1, 4], SCALE)
    assert (library.plans, by_triton.asked) == (planned, asked)


def test_a_kernel_that_is_not_compiled_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton's would be timed in its place."""
    known = frozenset({FlashKernel("fa2", torch.bfloat16, HEADS.head_dim)})
    library = install(monkeypatch, kernels=FlashKernels(known, "there is no nvcc to compile more"))
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    for name, small in (("NUM_ROWS", 4), ("CHUNK", 16), ("LAUNCHES", 1)):
        monkeypatch.setattr(attention_timing, name, small)
    cache = attention_timing.random_cache(HEADS, torch.bfloat16, torch.device("cpu"), num_bytes=1)
    ops, result = ReferenceOps(), Measured({}, {}, "2026-11-28")
    reference: Any = SimpleNamespace(plan=ops.plan_attention, plan_decode=ops.plan_decode, paged=ops.attention_paged)
    for case, times in zip(attention_timing.cases(cache), ((2.0,), (2.0, 1.0)), strict=True):
        ours = attention_timing.prepared(reference, case, cache, HEADS)
        candidates = attention_timing.paged_candidates(SITE, case, cache, HEADS)
        attention_timing.compare(case.use, ours, candidates, timed(*times), result)
    said = f"-{HEADS.head_dim} for bfloat16 is not compiled, and there is no nvcc to compile more"
    assert result.left_out[DECODES] == {"flashinfer": f"decode{said}"}
    assert result.left_out[PROMPTS]["flashinfer-fa3"] == f"fa3{said}" and "flashinfer-fa2" in result.seconds[PROMPTS]


def test_what_is_chosen_by_name_says_which_kernels_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    known = frozenset({FlashKernel("fa2", torch.bfloat16, 128)})
    install(monkeypatch, kernels=FlashKernels(known, "its package has no sources to compile more"))
    reasons = choose_by_name("flashinfer").reasons
    assert (
        "there are fa2-128, and its package has no sources to compile more; others, and captured steps with prompts, "
        "take Triton" in reasons["attention_paged"]
    )


def test_the_doctor_says_what_is_missing_and_which_kernels_there_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert doctor._flashinfer().startswith("the package is not installed; `pip install -U flashinfer-python` adds it")
    monkeypatch.setitem(sys.modules, "flashinfer", installation(tmp_path, FA2_128, DECODE_128, sources=False))
    assert doctor._flashinfer() == "decode-128, fa2-128 are compiled; its package has no sources to compile more"
    monkeypatch.setattr(flashinfer_kernels, "installed", FlashKernels)
    assert doctor._flashinfer() == "compiles at first use"

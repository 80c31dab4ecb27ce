"""Calls of FlashInfer that our code makes fit the package: the released one, whose signatures are a file here, and the
installed one. Computing with the stand-in, which refuses what does not fit, finds the calls."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement

from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.cuda.attention import CudaAttention
from hydra_engine.backend.cuda.flashinfer_attention import FlashInferAttention
from tests.ops.flashinfer_library import FACTS, NUM_SMS, SIGNATURES, Library, install, send
from tools.library_signatures import facts_of

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def compute(signatures: Mapping[str, inspect.Signature]) -> set[str]:
    """Everything that FlashInferAttention does. The calls that were made."""
    library = Library(signatures)
    attention = FlashInferAttention(CPU, NUM_SMS, send, CudaAttention(CPU, NUM_SMS, send, deterministic=False), library)
    cache = PagedCache(torch.randn(8, 1, 2, 8, 2, 64).to(torch.bfloat16))
    q = torch.randn(4, 2, 64).to(torch.bfloat16)
    ints = partial(torch.tensor, dtype=torch.int32)
    tables = torch.arange(8, dtype=torch.int32).view(2, 4)
    attention.paged(q, cache, 0, attention.plan(ints([0, 1, 4]), ints([5, 9]), tables), 0.1)
    attention.attend_packed(q, q, q, [0, 1, 4], 0.1)
    captured = attention.plan_decode(ints([1, 1]), tables)
    assert captured.refresh is not None
    for context in (4, 5):
        captured.refresh(np.full(2, context, dtype=np.int32), tables.numpy())
        attention.paged(q[:2], cache, 0, captured, 0.1)
    return library.called


# What our calls give by position.
_PAGES = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
_SHAPE = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")
_SHAPE_QK = ("num_qo_heads", "num_kv_heads", "head_dim_qk")
POSITIONAL: dict[str, tuple[str, ...]] = {
    "BatchDecodeWithPagedKVCacheWrapper.__init__": ("self", "float_workspace_buffer"),
    "BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer": (
        *("self", "float_workspace_buffer", "int_workspace_buffer"),
    ),
    "BatchDecodeWithPagedKVCacheWrapper.plan": ("self", "indptr", "indices", "last_page_len", *_SHAPE),
    "BatchDecodeWithPagedKVCacheWrapper.run": ("self", "q", "paged_kv_cache"),
    "BatchPrefillWithPagedKVCacheWrapper.__init__": ("self", "float_workspace_buffer"),
    "BatchPrefillWithPagedKVCacheWrapper.plan": ("self", "qo_indptr", *_PAGES, *_SHAPE_QK, "page_size"),
    "BatchPrefillWithPagedKVCacheWrapper.run": ("self", "q", "paged_kv_cache"),
    "BatchPrefillWithRaggedKVCacheWrapper.__init__": ("self", "float_workspace_buffer"),
    "BatchPrefillWithRaggedKVCacheWrapper.plan": ("self", "qo_indptr", "kv_indptr", *_SHAPE_QK),
    "BatchPrefillWithRaggedKVCacheWrapper.run": ("self", "q", "k", "v"),
    "fast_decode_plan": ("self", "indptr", "indices", "last_page_len", *_SHAPE),
}


def check_order(signatures: Mapping[str, inspect.Signature]) -> None:
    for name, wanted in POSITIONAL.items():
        assert (*signatures[name].parameters,)[: len(wanted)] == wanted, name


def installed_signatures(package: Any) -> dict[str, inspect.Signature]:
    def one(name: str) -> inspect.Signature:
        outer, _, method = name.partition(".")
        owner = getattr(package, outer)
        return inspect.signature(getattr(owner, method) if method else owner)

    return {name: one(name) for name in SIGNATURES}


def test_what_is_given_by_position_has_its_place_in_the_released_package() -> None:
    check_order(SIGNATURES)
    assert POSITIONAL.keys() == SIGNATURES.keys()
    text = str(SIGNATURES["fast_decode_plan"])
    namespace: dict[str, Any] = {}
    exec(f"def call{text.replace('num_qo_heads, num_kv_heads', 'num_kv_heads, num_qo_heads')}: ...", namespace)
    with pytest.raises(AssertionError, match="fast_decode_plan"):
        check_order(SIGNATURES | {"fast_decode_plan": inspect.signature(namespace["call"])})


def test_every_call_fits_the_released_package(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert compute(SIGNATURES) == SIGNATURES.keys(), "a signature that nothing needs"


def test_every_call_fits_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("flashinfer", exc_type=ImportError)

    signatures = installed_signatures(package)
    install(monkeypatch)
    compute(signatures)
    check_order(signatures)


@pytest.mark.parametrize("name", ["BatchDecodeWithPagedKVCacheWrapper.plan", "fast_decode_plan"])
def test_a_call_that_does_not_fit_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    text = str(SIGNATURES[name])
    for changed in (text.replace("sm_scale", "softmax_scale"), text.replace("page_size", "page_size, page_bytes", 1)):
        namespace: dict[str, Any] = {}
        exec(f"def call{changed}: ...", namespace)
        with pytest.raises(TypeError, match=r"sm_scale|page_bytes"):
            compute(SIGNATURES | {name: inspect.signature(namespace["call"])})


def test_the_release_is_one_that_the_extra_allows() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = [Requirement(one) for one in extras["cuda"] if Requirement(one).name == FACTS["package"]]
    assert FACTS["version"] in wanted.specifier


def test_signatures_are_read_out_of_a_wheel(tmp_path: Path) -> None:
    """Overloads, keywords that go on to another method, names that are exported from elsewhere."""
    source = """
from typing import overload
def helper(x: int = 3, /, *, y: str = "a" + "b") -> int: ...
class Wrapper:
    @overload
    def run(self, q: int) -> int: ...
    def run(self, q: int, *args: int, out=None) -> int: ...
    def plan(self, rows: list, **kwargs: object) -> None: ...
    def _plan_impl(self, rows: list, scale: float | None = None, *, block: int = 16) -> None: ...
"""
    wheel = tmp_path / "a.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr("lib-1.2.dist-info/METADATA", "Name: lib\nVersion: 1.2\n")
        archive.writestr(
            "lib/__init__.py", "from .parts.inner import Wrapper as Outer\nfrom .parts.inner import helper\n"
        )
        archive.writestr("lib/parts/inner.py", source)
    facts = facts_of(wheel, "lib", ["Outer.run", "Outer.plan", "helper"])
    assert facts == {
        "package": "lib",
        "version": "1.2",
        "calls": {
            "Outer.run": "(self, q, *args, out=None)",
            "Outer.plan": "(self, rows, *, scale=None, block=16)",
            "helper": "(x=3, /, *, y='a' + 'b')",
        },
    }
    with pytest.raises(LookupError, match="lib exports no Wrapper"):
        facts_of(wheel, "lib", ["Wrapper.run"])

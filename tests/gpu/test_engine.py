"""Whole engines on a device: transformers' tokens, equal tokens with and without graphs, memory that comes back.

The CPU's tests say what is right (tests/engine); here the same public class runs with `device="cuda:0"`.
HYDRA_STRESS_REQUESTS sets how many requests the last test sends (100 unless set).
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.miniatures import make_tiny

shared = pytest.importorskip("tests.engine.conftest", reason="needs all of the engine", exc_type=ModuleNotFoundError)
frame = pytest.importorskip("tests.models.families.base", exc_type=ModuleNotFoundError)
families = pytest.importorskip("tests.models.families.cases", exc_type=ModuleNotFoundError)
config = pytest.importorskip("hydra_engine.config")
errors = pytest.importorskip("hydra_engine.errors")
registry = pytest.importorskip("hydra_engine.models.specs.registry")

pytestmark = pytest.mark.cuda

DEVICE = "cuda:0"
FAMILIES = ("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
FAMILIES += ("llava_next", "internvl")
# Prompt, and sizes of its pictures.
CASES: list[tuple[str, list[tuple[int, int]]]] = [
    ("What is this?", []),
    ("One picture.", [(64, 64)]),
    ("Two of them: compare.", [(64, 64), (90, 40)]),
    ("A long text without any picture in it, " * 6, []),
    ("x", [(120, 64)]),
]
HYBRID = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
HYBRID |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
NUM_TOKENS = 24
STRESS_REQUESTS = int(os.environ.get("HYDRA_STRESS_REQUESTS", "100"))
# A step of another order of sums changes float32 logits of these models by less than this.
TIE = 1e-3
SPARE_BYTES = 4 << 20  # workspaces of a library that is used for the first time


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random miniature of a family, written once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def of(family: str) -> Path:
        if not (root / family).exists():
            make_tiny(family, root / family, seed=7)
        return root / family

    return of


@contextmanager
def engine_of(model: Path, **options: Any) -> Iterator[Any]:
    """Holds nothing at its end."""
    settings = {"device": DEVICE, "num_kv_blocks": 1024} | options
    with shared.Engine(model, **settings) as engine:
        yield engine
        shared.assert_at_rest(engine)


def pictures(case: int) -> list[Any]:
    return [shared.picture(10 * case + i, *size) for i, size in enumerate(CASES[case][1])]


def asked(engine: Any, case: int, **sampling: Any) -> Any:
    defaults = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return engine.submit(CASES[case][0], pictures(case) or None, **(defaults | sampling))


def all_results(engine: Any) -> list[Any]:
    """Results of all cases in one batch, with the token ids of their prompts."""
    handles = [asked(engine, case) for case in range(len(CASES))]
    return [handle.result(120) for handle in handles]


class Reference:
    """transformers on the processor, where float32 is float32, for prompts as the engine has them."""

    def __init__(self, family: str, model: Path, dtype: torch.dtype = torch.float32) -> None:
        self._side = frame.Reference(families.CASES[family], model, dtype)
        self._image = getattr(self._side.model.config, "image_token_id", -1)

    def _prompt(self, case: int, token_ids: tuple[int, ...]) -> Any:
        types = [int(token == self._image) for token in token_ids]
        return frame.Prompt(list(token_ids), pictures(case), [], token_types=types)

    def tokens(self, case: int, prompt: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._side.generate(self._prompt(case, prompt), NUM_TOKENS))

    def gap(self, case: int, before: tuple[int, ...], left: int, right: int) -> float:
        """Distance between the logits of two tokens that could follow `before`, which is prompt and answer so far."""
        logits = self._side.logits(self._prompt(case, before))[-1]
        return float((logits[left] - logits[right]).abs())


def shared_beginning(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), len(left))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers_in_float32(
    cuda: torch.device, checkpoints: Callable[[str], Path], family: str
) -> None:
    """Compares to the end, or to where transformers itself can hardly tell two tokens apart."""
    reference = Reference(family, checkpoints(family))
    with engine_of(checkpoints(family), dtype="float32") as engine:
        found = all_results(engine)
    for case, result in enumerate(found):
        ours, prompt = result.token_ids, result.prompt_token_ids
        theirs = reference.tokens(case, prompt)
        same = shared_beginning(ours, theirs)
        if same < NUM_TOKENS:
            gap = reference.gap(case, (*prompt, *theirs[:same]), ours[same], theirs[same])
            assert gap < TIE, f"case {case}: token {same} is {ours[same]} and not {theirs[same]}, {gap:.2g} apart"


def test_tokens_of_a_hybrid_model_equal_the_processors_in_float32(cuda: torch.device, tmp_path: Path) -> None:
    """The family has recurrent layers, which the oldest transformers that the engine takes cannot run."""
    make_tiny("minicpmv4_6", tmp_path, seed=7, text_type="qwen3_5_text", text=HYBRID)
    assert registry.load_spec(tmp_path).language.has_states
    found = []
    for options in ({}, {"device": "cpu", "threads": 2}):
        with engine_of(tmp_path, dtype="float32", **options) as engine:
            found.append([result.token_ids for result in all_results(engine)])
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_bfloat16_agrees_with_float32_as_often_as_transformers_does(
    cuda: torch.device, checkpoints: Callable[[str], Path], family: str
) -> None:
    """Counted in tokens before the first other one; random weights make that early for everybody."""
    truth = Reference(family, checkpoints(family))
    half = Reference(family, checkpoints(family), torch.bfloat16)
    with engine_of(checkpoints(family), dtype="bfloat16") as engine:
        found = all_results(engine)
    ours = theirs = 0
    for case, result in enumerate(found):
        expected = truth.tokens(case, result.prompt_token_ids)
        ours += shared_beginning(result.token_ids, expected)
        theirs += shared_beginning(half.tokens(case, result.prompt_token_ids), expected)
    assert ours >= 0.5 * theirs, f"{ours} tokens agree, of transformers' {theirs}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_change_no_token(cuda: torch.device, checkpoints: Callable[[str], Path], dtype: str) -> None:
    """Ops are batch-invariant: a graph has more rows than requests, and more patches than their pictures."""
    model, found = checkpoints("llava"), []
    for options in ({}, {"enforce_eager": True}):
        with engine_of(model, dtype=dtype, deterministic=True, **options) as engine:
            assert bool(engine.summary.captured_patches) == (not options)
            greedy = [asked(engine, case).result(120).token_ids for case in range(len(CASES))]
            drawn = [asked(engine, case, temperature=1.0, seed=case, top_p=0.9).result(120) for case in (0, 3)]
            found.append((greedy, [result.token_ids for result in drawn]))
    assert found[0] == found[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_encodes_change_no_token(cuda: torch.device, checkpoints: Callable[[str], Path], family: str) -> None:
    """Encodes pictures one by one, padded, and all in one batch."""
    found = []
    for options in ({"encoder_cuda_graph_sizes": (64, 512, 4096)}, {"enforce_eager": True}):
        with engine_of(checkpoints(family), dtype="bfloat16", deterministic=True, **options) as engine:
            assert bool(engine.summary.captured_patches) == ("enforce_eager" not in options)
            alone = [asked(engine, case).result(120).token_ids for case in (1, 2, 4)]
            found.append((alone, [result.token_ids for result in all_results(engine)]))
    assert found[0] == found[1]


def test_batches_are_answered_together(cuda: torch.device, checkpoints: Callable[[str], Path]) -> None:
    """Many of one request beside all others: each gets what it gets alone."""
    with engine_of(checkpoints("llava"), dtype="float32", deterministic=True) as engine:
        alone = [asked(engine, case).result(120).token_ids for case in range(len(CASES))]
        handles = [(case, asked(engine, case)) for _ in range(6) for case in range(len(CASES))]
        for case, handle in handles:
            assert handle.result(120).token_ids == alone[case]


@pytest.mark.alone
def test_memory_comes_back_after_many_requests_and_aborts(
    cuda: torch.device, checkpoints: Callable[[str], Path]
) -> None:
    before = allocated(cuda)
    rng = random.Random(3)
    with engine_of(checkpoints("llava"), dtype="bfloat16", max_num_seqs=16, max_queue=4096) as engine:
        storm(engine, 40, rng)  # all sizes of steps have been seen, all libraries are loaded
        torch.cuda.synchronize(cuda)
        settled, reserved = torch.cuda.memory_allocated(cuda), torch.cuda.memory_reserved(cuda)
        ended = storm(engine, STRESS_REQUESTS, rng)
        assert ended["done"] and ended["given up"]
        torch.cuda.synchronize(cuda)
        assert torch.cuda.memory_allocated(cuda) - settled <= SPARE_BYTES
        assert torch.cuda.memory_reserved(cuda) - reserved <= 16 * SPARE_BYTES
    assert allocated(cuda) - before <= SPARE_BYTES


def allocated(cuda: torch.device) -> int:
    """Bytes without the workspaces that cuBLAS keeps for every stream that it has seen, also for lanes that are
    gone."""
    gc.collect()
    torch.cuda.synchronize(cuda)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(cuda)


def storm(engine: Any, count: int, rng: random.Random) -> dict[str, int]:
    """`count` requests, up to 24 at once, of which a third is given up at some moment; all come to an end."""
    ended = {"done": 0, "given up": 0}
    waiting: list[Any] = []

    def end(handle: Any) -> None:
        try:
            handle.result(120)
            ended["done"] += 1
        except errors.RequestAborted:
            ended["given up"] += 1

    for number in range(count):
        case = rng.randrange(len(CASES))
        waiting.append(asked(engine, case, max_tokens=rng.choice((1, 8, 40))))
        if rng.random() < 1 / 3:
            waiting[rng.randrange(len(waiting))].cancel()
        if len(waiting) == 24 or number == count - 1:
            while len(waiting) > (0 if number == count - 1 else 12):
                end(waiting.pop(0))
    assert sum(ended.values()) == count
    shared.assert_at_rest(engine, 20.0)
    return ended

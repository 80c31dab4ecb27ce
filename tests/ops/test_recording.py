"""Layers that are recorded and replayed: the bits of the calls themselves, whatever was computed in between."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import DeltaInputs, PagedCache, StateCache, StateRows, States, StepInputs
from hydra_engine.backend.cpu.ops import MAX_RECORDED_ROWS, NativeOps, RecordedDecode
from hydra_engine.backend.quantized import quantized

HEADS, KV_HEADS, DIM, LAYERS, BLOCK, BLOCKS = 4, 2, 16, 2, 4, 40
SIZE, INNER = HEADS * DIM, 96
PLACES, TAPS = 2 * (MAX_RECORDED_ROWS + 1), 4
VOCAB, POSITIONS = 50, 40
Given = tuple[Tensor, Tensor, Tensor, PagedCache, StepInputs]


class Layers:
    """Two layers of a decoder in `dtype`, behind an embedding in `table`, and inputs for them."""

    def __init__(self, dtype: torch.dtype, table: torch.dtype | None = None) -> None:
        self.ops, self.dtype = NativeOps(), dtype
        self.calls = 0
        self._random = torch.Generator().manual_seed(0)
        shapes = {"qkv": ((HEADS + 2 * KV_HEADS) * DIM, SIZE), "out": (SIZE, SIZE), "up": (2 * INNER, SIZE)}
        self._weights = {
            name: self.ops.pack_linear(self.normal(*shape) / 8, rows=dtype)
            for name, shape in (*shapes.items(), ("down", (SIZE, INNER)))
        }
        self._norm = self.normal(SIZE)
        self._table = self.normal(VOCAB, SIZE).to(table or dtype)
        self.angles = torch.randn(POSITIONS, DIM, generator=self._random)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random).to(self.dtype)

    def cache(self) -> PagedCache:
        return PagedCache(self.normal(BLOCKS, LAYERS, 2, BLOCK, KV_HEADS, DIM))

    def given(self, rows: int, cache: PagedCache) -> Given:
        """Inputs with a context for each row, in blocks of its own where there are enough."""
        contexts = torch.randint(1, 3 * BLOCK, (rows,), generator=self._random, dtype=torch.int32)
        tables = torch.randperm(BLOCKS, generator=self._random).to(torch.int32).repeat(3 * rows)[: 3 * rows].view(-1, 3)
        last = contexts.long() - 1
        slots = tables.long().gather(1, last[:, None] // BLOCK)[:, 0] * BLOCK + last % BLOCK
        token_ids = torch.randint(0, VOCAB, (rows,), generator=self._random)
        plan = self.ops.plan_attention(torch.arange(rows + 1, dtype=torch.int32), contexts, tables.contiguous())
        return token_ids, last, self.angles, cache, StepInputs(slots, plan)

    def __call__(
        self, token_ids: Tensor, positions: Tensor, angles: Tensor, cache: PagedCache, places: StepInputs
    ) -> Tensor:
        self.calls += 1
        hidden = self._table.index_select(0, token_ids).to(self.dtype)
        cos, sin = angles.index_select(0, positions).chunk(2, dim=1)
        rotary = cos, sin
        ops, weights = self.ops, self._weights
        residual, hidden = hidden, ops.rms_norm(hidden, self._norm, 1e-5)
        for layer in range(LAYERS):
            qkv = self.qkv(hidden, layer, places.states).unflatten(1, (-1, DIM))
            q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            q = ops.rope_and_write(q, k, v, rotary, cache, layer, places.slots)
            mixed = ops.attention_paged(q, cache, layer, places.attention, DIM**-0.5).flatten(1)
            hidden, residual = ops.add_rms_norm(ops.linear(mixed, weights["out"]), residual, self._norm, 1e-5)
            inner = ops.act_and_mul(ops.linear(hidden, weights["up"]), "silu")
            hidden, residual = ops.add_rms_norm(ops.linear(inner, weights["down"]), residual, self._norm, 1e-5)
        return hidden

    def qkv(self, hidden: Tensor, layer: int, states: States | None) -> Tensor:
        return self.ops.linear(hidden, self._weights["qkv"])


class SeveralForms(Layers):
    """Queries and keys are of another form than values, as in GGUF's Q4_K_M."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        first, second = ((HEADS + KV_HEADS) * DIM, 4), (KV_HEADS * DIM, 8)
        self._parts = [
            self.ops.pack_linear(quantized(self.normal(rows, SIZE), bits, 32, torch.float16))
            for rows, bits in (first, second)
        ]

    def qkv(self, hidden: Tensor, layer: int, states: States | None) -> Tensor:
        return torch.cat([self.ops.linear(hidden, part) for part in self._parts], dim=1)


class Recurrent(Layers):
    """Layers with a state for each row, which every step reads in one place and writes to another."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._taps = self.normal((HEADS + 2 * KV_HEADS) * DIM, TAPS)
        self._rates, self._shift = self.normal(HEADS).float(), self.normal(HEADS).float()
        self.states = StateCache(
            self.normal(PLACES, LAYERS, TAPS - 1, (HEADS + 2 * KV_HEADS) * DIM),
            self.normal(PLACES, LAYERS, HEADS, DIM, DIM).float(),
        )

    def given(self, rows: int, cache: PagedCache) -> Given:
        numbers = torch.randperm(PLACES, generator=self._random)
        starts = torch.randint(0, 3, (rows,), generator=self._random)
        state_rows = StateRows(torch.arange(rows + 1), starts, numbers[:rows], numbers[-rows:])
        *others, places = super().given(rows, cache)
        return *others, places._replace(states=States(self.states, state_rows))

    def qkv(self, hidden: Tensor, layer: int, states: States | None) -> Tensor:
        assert states is not None
        mixed = self.ops.causal_conv(super().qkv(hidden, layer, states), self._taps, states.cache, layer, states.rows)
        k, q, v = mixed.unflatten(1, (-1, DIM)).split((KV_HEADS, KV_HEADS, HEADS), dim=1)
        a, b = mixed[:, :HEADS], mixed[:, HEADS : 2 * HEADS]
        out = self.ops.delta_rule(
            DeltaInputs(q, k, v, a, b, self._rates, self._shift), states.cache, layer, states.rows
        )
        return torch.cat((out.flatten(1), mixed[:, HEADS * DIM :]), dim=1)


class Mixture(Layers):
    """Layers whose tokens choose experts, others in each step, beside a shared one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        gate_up, down = ([self.normal(*shape) / 8 for _ in range(7)] for shape in ((2 * INNER, SIZE), (SIZE, INNER)))
        self._experts = self.ops.pack_experts(gate_up, down, dtype)
        self._router = self.ops.pack_linear(self.normal(6, SIZE))
        self._gate = self.ops.pack_linear(self.normal(1, SIZE))

    def qkv(self, hidden: Tensor, layer: int, states: States | None) -> Tensor:
        logits, shared = self.ops.linear(hidden, self._router), self.ops.linear(hidden, self._gate)
        routes = self.ops.route(logits, 2, renormalise=True, shared=shared)
        return super().qkv(self.ops.experts(hidden, routes, self._experts, "silu"), layer, states)


def expected_of(layers: Layers, given: Given) -> tuple[Tensor, ...]:
    """Results of the layers themselves and contents of copied caches; the inputs are unchanged."""
    token_ids, positions, angles, cache, places = given
    copy, states = PagedCache(cache.data.clone()), places.states
    if states is None:
        return layers(token_ids, positions, angles, copy, places), copy.data
    state_copy = StateCache(states.cache.conv.clone(), states.cache.recurrent.clone())
    found = layers(token_ids, positions, angles, copy, places._replace(states=States(state_copy, states.rows)))
    return found, copy.data, state_copy.conv, state_copy.recurrent


def left_in(given: Given) -> tuple[Tensor, ...]:
    """Contents of the caches."""
    *_, cache, (_, _, states) = given
    return cache.data, *(() if states is None else (states.cache.conv, states.cache.recurrent))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Layers, SeveralForms, Recurrent, Mixture])
@torch.inference_mode()
def test_replays_are_the_calls(isa: str, threads: int, kind: type[Layers], dtype: torch.dtype) -> None:
    layers = kind(dtype)
    recorded, cache = RecordedDecode(layers), layers.cache()
    recordings: set[int] = set()
    for rows in (1, 3, 1, MAX_RECORDED_ROWS, 3, 2, 1, MAX_RECORDED_ROWS + 1, 3):
        given = layers.given(rows, cache)
        expected = expected_of(layers, given)
        before = layers.calls
        found = recorded(*given)
        assert all(torch.equal(*pair) for pair in zip((found, *left_in(given)), expected, strict=True)), rows
        assert layers.calls - before == (rows not in recordings)
        recordings |= {rows} if rows <= MAX_RECORDED_ROWS else set()


@pytest.mark.parametrize("table", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_rows_of_a_narrower_table_are_widened(table: torch.dtype) -> None:
    layers = Layers(torch.float32, table)
    recorded, cache = RecordedDecode(layers), layers.cache()
    for calls in (2, 3):  # of the first one, besides that of the expected, the recording's
        given = layers.given(3, cache)
        expected, _ = expected_of(layers, given)
        assert torch.equal(recorded(*given), expected) and layers.calls == calls


@torch.inference_mode()
def test_angles_of_other_memory_are_recorded_anew() -> None:
    layers = Layers(torch.float32)
    recorded, cache = RecordedDecode(layers), layers.cache()
    for _ in range(3):
        layers.angles = torch.cat((layers.angles, layers.angles + 1))
        given = layers.given(2, cache)
        expected, _ = expected_of(layers, given)
        assert torch.equal(recorded(*given), expected)


@torch.inference_mode()
def test_another_cache_is_recorded_anew() -> None:
    layers = Layers(torch.float32)
    recorded = RecordedDecode(layers)
    for cache in (layers.cache(), layers.cache()):
        for _ in range(2):
            given = layers.given(2, cache)
            expected, written = expected_of(layers, given)
            assert torch.equal(recorded(*given), expected) and torch.equal(cache.data, written)


class Doubling(Layers):
    def __call__(self, *given: Any) -> Tensor:
        return super().__call__(*given) * 2


class Transposing(Layers):
    """Layers that use what torch calls a view and copies."""

    def __call__(self, *given: Any) -> Tensor:
        return super().__call__(*given).t().reshape(-1, SIZE)


@pytest.mark.parametrize("kind", [Doubling, Transposing])
@torch.inference_mode()
def test_what_torch_computes_is_not_left_out(kind: type[Layers]) -> None:
    layers = kind(torch.float32)
    recorded, cache = RecordedDecode(layers), layers.cache()
    for _ in range(2):
        given = layers.given(2, cache)
        expected, _ = expected_of(layers, given)
        assert torch.equal(recorded(*given), expected)


@torch.inference_mode()
def test_contents_are_checked_in_every_replay() -> None:
    layers = Layers(torch.float32)
    recorded, cache = RecordedDecode(layers), layers.cache()
    recorded(*layers.given(2, cache))
    *others, places = layers.given(2, cache)
    before = cache.data.clone()
    with pytest.raises(ValueError, match="slots: expected -1 to"):
        recorded(*others, places._replace(slots=places.slots + BLOCK * BLOCKS))
    token_ids, positions, angles, _ = others
    for wrong_ids, wrong_positions in ((token_ids + VOCAB, positions), (token_ids, positions - POSITIONS)):
        with pytest.raises(ValueError, match="ids: expected 0 to"):
            recorded(wrong_ids, wrong_positions, angles, cache, places)
    for cut in (token_ids[:1], token_ids.int(), torch.cat((token_ids, token_ids))[::2]):
        with pytest.raises(ValueError, match="expected contiguous"):
            recorded(token_ids, cut, angles, cache, places)
    tables = torch.full((2, 3), BLOCKS, dtype=torch.int32)
    wrong = layers.ops.plan_attention(places.attention.cu_q, places.attention.num_context, tables)
    with pytest.raises(ValueError, match="block_tables: expected 0 to"):
        recorded(*others, StepInputs(places.slots - places.slots - 1, wrong))
    assert torch.equal(cache.data, before)
    expected, _ = expected_of(layers, (*others, places))
    assert torch.equal(recorded(*others, places), expected)


@pytest.mark.slow
def test_recording_does_not_import_torch_s_compiler() -> None:
    """Runs in a process of its own; the import would take a second of every start."""
    script = """
import sys
import torch
from hydra_engine.backend.cpu.ops import _Recorder, _RecordingMemory

with _Recorder(_RecordingMemory()):
    torch.empty(3)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)

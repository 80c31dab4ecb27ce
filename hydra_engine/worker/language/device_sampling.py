"""How the device samples the rows that need nothing but filters and a draw: numbers per slot, arrays per step.

Rows that need more are sampled on the host (`SamplingState.device_path_from`). Numbers are those of
`sampler.draw_number`, for a whole step at once. Does not know devices, logits or plans.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hydra_engine.core.plans import Ints
from hydra_engine.worker.language.sampler import GOLDEN, MAX_NUMBER, SamplingState, seed_state

_Floats = npt.NDArray[np.float32]
_Words = npt.NDArray[np.uint64]

_MAX_TOP_K = (1 << 31) - 1
_LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)  # 0 would mean the largest logit


class SamplingArrays(NamedTuple):
    """`SamplingTensors` of backend/base.py in host memory, [B] each."""

    temperatures: _Floats
    top_k: npt.NDArray[np.int32]
    top_p: _Floats
    min_p: _Floats
    numbers: _Floats


class SlotSampling:
    """One entry per slot of everything. Rows of slots that nobody has taken, and of requests that need the host, get a
    token as well, which nobody reads."""

    def __init__(self, num_seq_slots: int) -> None:
        self._temperatures: _Floats = np.zeros(num_seq_slots, dtype=np.float32)
        self._top_k: npt.NDArray[np.int32] = np.zeros(num_seq_slots, dtype=np.int32)
        self._top_p: _Floats = np.ones(num_seq_slots, dtype=np.float32)
        self._min_p: _Floats = np.zeros(num_seq_slots, dtype=np.float32)
        self._states: _Words = np.zeros(num_seq_slots, dtype=np.uint64)  # of the seeds' generators

    def take(self, seq_slot: int, state: SamplingState) -> None:
        params = state.params
        self._temperatures[seq_slot] = 0.0 if params.greedy else max(params.temperature, _LEAST_TEMPERATURE)
        self._top_k[seq_slot] = min(max(params.top_k, 0), _MAX_TOP_K)
        self._top_p[seq_slot] = params.top_p
        self._min_p[seq_slot] = params.min_p
        self._states[seq_slot] = seed_state(state.seed)

    def of(self, seq_slots: Ints, num_generated: Ints) -> SamplingArrays:
        temperatures = self._temperatures[seq_slots]
        if temperatures.any():
            numbers = draw_numbers(self._states[seq_slots], num_generated)
        else:
            numbers = np.zeros(len(seq_slots), dtype=np.float32)
        return SamplingArrays(
            temperatures, self._top_k[seq_slots], self._top_p[seq_slots], self._min_p[seq_slots], numbers
        )


def draw_numbers(states: _Words, counters: Ints) -> _Floats:
    """`sampler.draw_number` of each pair, of seeds' states."""
    steps = (counters + 1).astype(np.uint64) * np.uint64(GOLDEN)  # modulo 2^64, as all of this
    bits = _mix64(states + steps) >> np.uint64(11)
    return np.minimum((bits * 2.0**-53).astype(np.float32), np.float32(MAX_NUMBER))


def _mix64(values: _Words) -> _Words:
    """`sampler.mix64`"""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)

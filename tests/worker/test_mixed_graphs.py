"""Steps of decodes beside prompts, replayed over real miniatures: the tokens of the steps that are over when they
return, and which steps are replayed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hydra_engine.core.request import Request
from hydra_engine.worker.language import lane
from hydra_engine.worker.language.graphs import MAX_TOKENS, MixedSize, mixed_sizes
from tests.worker.fakes import Rig, Row, make_request, outcomes_of
from tests.worker.late import LateDevice
from tests.worker.test_graphs import expected, graph_rig, leave, requests
from tests.worker.test_real_model import make_rig
from tools.miniatures import make_tiny

HYBRID = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 4, "top_p": 0.95},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"logprobs": 2, "temperature": 0.8, "seed": 6},
    {"min_tokens": 3, "logit_bias": {7: 4.0}},
    {"temperature": 0.7, "seed": 5, "top_k": 4, "min_p": 0.1},
]


@pytest.fixture(scope="module", params=["llava", "qwen2_vl"])
def model_dir(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Positions on one axis, and on three."""
    directory: Path = tmp_path_factory.mktemp(f"tiny-{request.param}")
    make_tiny(request.param, directory, seed=3)
    return directory


@pytest.fixture
def device() -> LateDevice:
    return LateDevice()


@pytest.fixture
def rig(model_dir: Path, device: LateDevice) -> Iterator[Rig]:
    rig = graph_rig(model_dir, device, num_seq_slots=12)
    yield rig
    rig.worker.close()


def texts(base: int) -> list[Request]:
    lengths = (9, 1, 13, 5, 11, 3)
    return [
        make_request(base + i, range(5 + 7 * i, 5 + 7 * i + length), **kind)
        for i, (length, kind) in enumerate(zip(lengths, KINDS, strict=True))
    ]


@cache
def expected_texts(model_dir: Path) -> list[list[int]]:
    rig = make_rig(model_dir, "reference")
    made = texts(10)
    for request in made:
        rig.add(request)
    tokens = rig.generate(*made)
    rig.worker.close()
    return tokens


def joining(rig: Rig, made: list[Request], chunk: int, steps: int = 8) -> list[list[int]]:
    """Lets another request join every other step with its first chunk; all steps are submitted before the first has
    come back. Returns the tokens of each request."""
    done, sampled = {request.id: 0 for request in made}, {request.id: 0 for request in made}
    submitted: list[tuple[list[Row], Any]] = []
    waiting, running = list(made), list[Request]()
    while waiting or running:
        if waiting and len(submitted) % 2 == 0:
            running.append(waiting.pop(0))
        rows = []
        for r in running:
            tokens = r.prompt_token_ids[done[r.id] : done[r.id] + chunk] or [-1]
            rows.append(rig.row(r, done[r.id], tokens, sampled[r.id]))
            done[r.id] += len(tokens)
            sampled[r.id] += done[r.id] >= r.num_prompt
        submitted.append((rows, rig.submit(*rows)))
        running = [r for r in running if sampled[r.id] < steps]
    found: dict[int, list[int]] = {request.id: [] for request in made}
    for rows, step in submitted:
        for outcome in outcomes_of(rows, rig.wait(step)):
            assert outcome.error is None
            if outcome.token_id is not None:
                found[outcome.request_id].append(outcome.token_id)
    return list(found.values())


@pytest.mark.quick("[llava-4")
@pytest.mark.parametrize("chunk", [4, 20])
def test_mixed_steps_give_the_same_tokens(rig: Rig, device: LateDevice, model_dir: Path, chunk: int) -> None:
    """A step is one replay, or two with special rows; none waits for another."""
    for base in (30, 60):
        device.replays.clear()
        made = texts(base)
        for request in made:
            rig.add(request)
        assert joining(rig, made, chunk) == expected_texts(model_dir)
        for request in made:
            rig.leave(request)
        num_steps = 18 if chunk == 20 else 20
        assert num_steps < len(device.replays) <= 2 * num_steps


@pytest.mark.quick("[llava")
def test_which_steps_are_replayed(rig: Rig, device: LateDevice, model_dir: Path) -> None:
    made = [make_request(number, range(20, 22)) for number in range(1, 9)]
    scored = make_request(40, range(20, 24), prompt_logprobs=1)
    for request in (*made, scored):
        rig.add(request)

    def replays(*rows: Row) -> int:
        device.replays.clear()
        assert all(outcome.error is None for outcome in rig.language(*rows))
        return len(device.replays)

    prompts = [rig.row(r, 0, r.prompt_token_ids, 0) for r in made]
    assert replays(*prompts) == 1
    assert replays(prompts[0], *(rig.row(r, 2, [-1], 1) for r in made[1:])) == 1
    prompt: Any = rig.row(scored, 0, scored.prompt_token_ids, 0)
    assert replays(replace(prompt, scored=True)) == 0
    long = make_request(41, range(1, 34))
    rig.add(long)
    assert replays(rig.row(long, 0, long.prompt_token_ids[:32], 0)) == 1, "no row that samples"
    assert replays(rig.row(long, 0, long.prompt_token_ids, 0)) == 0, "more tokens than any graph has"


@pytest.mark.quick("[llava")
def test_prompts_with_pictures_are_replayed(model_dir: Path) -> None:
    """Pictures whole and cut across chunks, several in a chunk, beside texts and decodes: every step is a replay, and
    the ones with special rows two."""
    device = LateDevice()
    rig = graph_rig(model_dir, device, num_seq_slots=12, token_budget=300)
    for number, chunk in enumerate((4, 1000), start=1):
        made, before = requests(rig, 70 * number, special=True), rig.next_step()
        assert rig.generate_ahead(*made, chunk=chunk) == expected(model_dir, special=True)
        num_steps = rig.next_step() - before - 1
        assert num_steps >= 8 and num_steps < len(device.replays) <= 2 * num_steps
        leave(rig, made)
    rig.worker.close()


def test_recurrent_states_are_inputs_of_steps_with_prompts(tmp_path: Path, device: LateDevice) -> None:
    """Replays every step, special rows once more. A state that leaves for another instance is copied behind the step,
    into blocks of the KV cache."""
    make_tiny("qwen3_5_text", tmp_path, seed=7, text=HYBRID)
    rig = graph_rig(tmp_path, device, num_seq_slots=12)
    made = texts(10)
    for request in made:
        rig.add(request)
    assert joining(rig, made, 4) == expected_texts(tmp_path)
    assert 20 < len(device.replays) <= 40
    language = rig.worker._language
    assert language is not None and language.graphs is not None
    parts = language.graphs.mixed._parts
    assert parts.states is not None
    one, other = (make_request(number, range(number, number + 9)) for number in (40, 41))
    for request in (one, other):
        rig.add(request)
    rig.language(rig.row(one, 0, one.prompt_token_ids, 0))
    state_bytes = parts.states.cache.nbytes // len(parts.states.cache.conv)
    count = -(-state_bytes // parts.kv_cache.block_bytes)
    blocks = np.arange(parts.kv_cache.num_blocks, dtype=np.int32)[-count:]
    device.replays.clear()
    chunk: Any = rig.row(other, 0, other.prompt_token_ids, 0)
    rig.language(rig.row(one, 9, [-1], 1), replace(chunk, exported_state=blocks))
    assert len(device.replays) == 1
    left = int(parts.states._current[chunk.seq_slot])
    pieces = list(parts.states._pieces(left, blocks, parts.kv_cache))
    assert sum(piece.numel() for piece, _ in pieces) == state_bytes
    assert all(torch.equal(*piece) for piece in pieces)
    rig.worker.close()


@pytest.mark.quick("[llava")
def test_without_room_for_their_graphs_steps_with_prompts_are_launched_op_by_op(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "mixed_sizes", lambda *given: mixed_sizes(*given[:2], max_tokens=0))
    device = LateDevice()
    rig = graph_rig(model_dir, device)
    assert rig.generate_ahead(*requests(rig, 20)) == expected(model_dir)
    assert len(device.replays) == 7 and rig.worker.captured_tokens == 0 and not rig.worker.notes
    rig.worker.close()


@pytest.mark.quick("[llava")
def test_a_row_that_is_not_finite_fails_alone(rig: Rig, device: LateDevice) -> None:
    first, second = make_request(1, range(20, 29)), make_request(2, range(30, 34), logprobs=1)
    for request in (first, second):
        rig.add(request)
    rig.language(rig.row(first, 0, first.prompt_token_ids, 0))
    rig.kv_cache.data[int(rig.tables[first.id][0])] = float("nan")
    device.replays.clear()
    broken, sound = rig.language(rig.row(first, 9, [-1], 1), rig.row(second, 0, second.prompt_token_ids, 0))
    assert len(device.replays) == 2 and sound.logprobs is not None
    assert broken.error is not None and broken.error.code == "numerical_error" and sound.error is None


def test_sizes() -> None:
    """Sizes go up to the tile of products that a budget ends in, with few rows, some, and as many as may run."""
    large = [(tokens, rows) for tokens in range(256, MAX_TOKENS + 1, 128) for rows in (8, 32, 256)]
    small = [(16, 8), (16, 16), (32, 8), (32, 32), (64, 8), (64, 32), (64, 64), (128, 8), (128, 32), (128, 128)]
    assert mixed_sizes(4096, 256) == mixed_sizes(2048, 256) == (*small, *large)
    assert {(512, 8), (768, 32), (1024, 8), (1536, 32), (2048, 8), (2048, 32)} < {*mixed_sizes(2048, 64)}
    assert mixed_sizes(520, 64)[-1] == (640, 64) and mixed_sizes(520, 64, max_tokens=256)[-1] == (256, 64)
    assert mixed_sizes(24, 6) == (MixedSize(16, 6), MixedSize(32, 6))
    assert mixed_sizes(1, 64) == (MixedSize(16, 8), MixedSize(16, 16))
    assert mixed_sizes(2048, 256, max_tokens=0) == ()
    assert max(size.rows for size in mixed_sizes(2048, 2000)) == 1024, "that attention can search"
    assert [MixedSize(2048, rows).chunks for rows in (8, 32, 256)] == [8, 32, 64]
    assert [MixedSize(tokens, 256).chunks for tokens in (256, 1024)] == [16, 32]

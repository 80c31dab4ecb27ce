"""Steps that run behind their launch, op by op and as replayed graphs, over real miniatures: the tokens of the steps
that are over when they return, whoever comes, goes or fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hydra_engine.config import EngineConfig
from hydra_engine.core.request import Request
from hydra_engine.errors import BackendError, ConfigError
from hydra_engine.models.layers.decoder import LanguageInput, RotaryTable
from hydra_engine.worker.language.batches import StepRows
from hydra_engine.worker.language.graphs import default_sizes
from tests.worker.fakes import Rig, make_request
from tests.worker.late import LateDevice
from tests.worker.test_real_model import make_rig, with_pictures
from tools.miniatures import make_tiny

SIZES = (1, 2, 4, 8)


@pytest.fixture(scope="module", params=["llava", "qwen2_vl"])
def model_dir(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Positions on one axis, and on three."""
    directory: Path = tmp_path_factory.mktemp(f"tiny-{request.param}")
    make_tiny(request.param, directory, seed=3)
    return directory


def graph_rig(model_dir: Path, device: LateDevice, **options: Any) -> Rig:
    options = {"num_seq_slots": 8, "token_budget": 24, "cuda_graph_sizes": SIZES, **options}
    rig = make_rig(model_dir, "reference", asynchronous=True, device=device, **options)
    rig.worker.capture_graphs(lambda done, total: None)
    device.replays.clear()
    return rig


@pytest.fixture
def device() -> LateDevice:
    return LateDevice()


@pytest.fixture
def rig(model_dir: Path, device: LateDevice) -> Iterator[Rig]:
    rig = graph_rig(model_dir, device)
    yield rig
    rig.worker.close()


def requests(rig: Rig, base: int, *, special: bool = False) -> list[Request]:
    """Five that ask for filters and a draw, and with `special` three that ask for more."""
    made = [
        make_request(base, range(10, 40)),
        make_request(base + 1, range(50, 57), temperature=1.0, seed=4, top_p=0.95),
        make_request(base + 2, [9], temperature=0.7, seed=5, top_k=4, min_p=0.1),
    ]
    if special:
        made += [
            make_request(base + 5, range(20, 33), min_tokens=3, temperature=1.0, seed=2),
            make_request(base + 6, [4, 4, 4], repetition_penalty=1.4),
            make_request(base + 7, range(30, 40), logprobs=2, temperature=0.8, seed=6),
        ]
    for request in made:
        rig.add(request)
    pictures = [
        with_pictures(rig, base + 3, seed=8, count=2),
        with_pictures(rig, base + 4, seed=9, count=1, temperature=0.9, top_k=20),
    ]
    if isinstance(rig.backend.device, LateDevice):
        rig.backend.device.replays.clear()  # the replays of encodes
    return [*made, *pictures]


def leave(rig: Rig, made: list[Request]) -> None:
    for request in made:
        rig.leave(request)


@cache
def expected(model_dir: Path, *, special: bool = False) -> list[list[int]]:
    """Expected outcomes, from synchronous steps."""
    rig = make_rig(model_dir, "reference")
    tokens = rig.generate(*requests(rig, 10, special=special))
    rig.worker.close()
    return tokens


@pytest.mark.quick("native")
@pytest.mark.parametrize("backend_name", ["reference", "native"])
def test_steps_behind_their_launch_give_the_same_tokens(model_dir: Path, backend_name: str) -> None:
    plain = make_rig(model_dir, backend_name)
    together = plain.generate(*requests(plain, 10, special=True))
    plain.worker.close()
    device = LateDevice()
    rig = make_rig(model_dir, backend_name, asynchronous=True, device=device, enforce_eager=True)
    rig.worker.capture_graphs(lambda done, total: pytest.fail("something was captured"))
    for number, (generate, chunk) in enumerate(((rig.generate, 1000), (rig.generate_ahead, 7))):
        made = requests(rig, 100 * (1 + number), special=True)
        assert generate(*made, chunk=chunk) == together
        leave(rig, made)
    assert not device.replays
    rig.worker.close()


@pytest.mark.quick("llava")
def test_replayed_steps_give_the_same_tokens(rig: Rig, device: LateDevice, model_dir: Path) -> None:
    for number, generate in enumerate((rig.generate, rig.generate_ahead)):
        device.replays.clear()
        made = requests(rig, 20 + 10 * number)
        assert generate(*made) == expected(model_dir)
        leave(rig, made)
        assert len(device.replays) == 7  # of eight steps the first is a prefill


@pytest.mark.quick("[llava")
def test_tables_may_be_wider_than_any_context(
    rig: Rig, device: LateDevice, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns after the blocks of a row may hold anything."""
    graphs = rig.worker._language.graphs.decodes
    assert graphs is not None
    replay = graphs.replay

    def wider(rows: StepRows, *given: Any) -> Any:
        more = graphs._width + 3 - rows.block_tables.shape[1]
        wide = rows._replace(block_tables=np.pad(rows.block_tables, ((0, 0), (0, more)), constant_values=-9))
        assert graphs.fits(wide)
        return replay(wide, *given)

    monkeypatch.setattr(graphs, "replay", wider)
    assert rig.generate_ahead(*requests(rig, 20)) == expected(model_dir)
    assert len(device.replays) == 7


@pytest.mark.quick("[llava")
def test_steps_with_special_rows_are_replayed(rig: Rig, device: LateDevice, model_dir: Path) -> None:
    """A step replays the graph of its rows and the one of its special rows; slots go to later requests, of other
    kinds."""
    for base, special in ((20, True), (40, False), (60, True)):
        device.replays.clear()
        made = requests(rig, base, special=special)
        assert rig.generate_ahead(*made) == expected(model_dir, special=special)
        assert len(device.replays) == (14 if special else 7)
        leave(rig, made)


@pytest.mark.quick("[llava")
def test_biases_that_no_graph_has_room_for(rig: Rig, device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hydra_engine.worker.language.step.MAX_BIASES", 2)
    found = []
    for base, count in ((20, 2), (40, 3)):
        device.replays.clear()
        biases = {**dict.fromkeys(range(30, 28 + count), -9.0), 31: 9.0}
        rig.add(request := make_request(base, [9, 8], logit_bias={**biases, 33: 1.0}))
        found.append(rig.generate_ahead(request)[0])
        assert bool(device.replays) == (count == 2)
    assert found[0] == found[1]


@pytest.mark.quick("[llava")
def test_what_raises_behind_a_replay_fails_its_rows(
    rig: Rig, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that raises after a replay is not run again: the last tokens of its rows have been written over."""
    special, plain = make_request(20, [9, 8], logprobs=1), make_request(21, [7, 6])
    for request in (special, plain):
        rig.add(request)
    rig.language(*(rig.row(r, 0, r.prompt_token_ids, 0) for r in (special, plain)))
    graphs = rig.worker._language.graphs
    device.replays.clear()
    assert graphs is not None

    def broken(*_: Any) -> Any:
        raise RuntimeError("no such launch")

    with monkeypatch.context() as patch:
        patch.setattr(graphs.special, "replay", broken)
        outcomes = rig.language(*(rig.row(r, r.num_prompt, [-1], 1) for r in (special, plain)))
    assert all(outcome.error is not None and outcome.token_id is None for outcome in outcomes)
    assert len(device.replays) == 1


@pytest.mark.quick("[llava")
def test_requests_join_and_leave_between_replays(rig: Rig, device: LateDevice, model_dir: Path) -> None:
    """Runs all numbers of rows, most of them padded; some steps hold a prefill among the decodes."""
    made = requests(rig, 20)
    tokens: dict[int, list[int]] = {request.id: [] for request in made}
    waiting, running = list(made), list[Request]()
    sizes = []
    while waiting or running:
        rows = [rig.row(r, r.num_prompt + len(tokens[r.id]) - 1, [-1], len(tokens[r.id])) for r in running]
        if waiting and len(sizes) % 2 == 0:
            running.append(waiting.pop(0))
            rows.append(rig.row(running[-1], 0, running[-1].prompt_token_ids, 0))
        for row, outcome in zip(rows, rig.language(*rows), strict=True):
            assert outcome.token_id is not None
            tokens[row.request_id].append(outcome.token_id)
        sizes.append(len(rows))
        running = [request for request in running if len(tokens[request.id]) < 8]
    assert list(tokens.values()) == expected(model_dir)
    assert {1, 2, 3, 4} <= set(sizes) and len(device.replays) > 8


@pytest.mark.quick("[llava")
def test_a_row_that_is_not_finite_fails_alone_in_a_replay(rig: Rig, device: LateDevice, model_dir: Path) -> None:
    made = requests(rig, 20)
    first = rig.language(*(rig.row(request, 0, request.prompt_token_ids, 0) for request in made))
    assert [o.token_id for o in first] == [tokens[0] for tokens in expected(model_dir)]
    rig.kv_cache.data[int(rig.tables[made[1].id][0])] = float("nan")
    device.working.clear()
    steps = []
    for count in range(1, 5):
        steps.append(rig.submit(*(rig.row(r, r.num_prompt + count - 1, [-1], count) for r in made)))
    device.working.set()
    results = [rig.wait(step) for step in steps]
    assert len(device.replays) >= 1 and [[row for row, _ in result.failures] for result in results] == [[1]] * 4
    assert results[0].failures[0][1].code == "numerical_error"
    assert all("earlier step" in result.failures[0][1].message for result in results[1:])
    for row in (0, 2, 3, 4):
        assert [int(result.token_ids[row]) for result in results] == expected(model_dir)[row][1:5]


@pytest.mark.quick("[llava")
@pytest.mark.parametrize("action", ["raise", "nan", "oom"])
def test_faults_in_the_middle_of_decodes(rig: Rig, action: str, model_dir: Path) -> None:
    made, poison = requests(rig, 20), make_request(40, [60, 61, 62])
    rig.add(poison)
    rig.language(*(rig.row(request, 0, request.prompt_token_ids, 0) for request in (*made, poison)))
    rig.worker.faults.arm("eng.mid_step", action, "token=61")
    rows = [rig.row(r, r.num_prompt, [-1], 1) for r in (*made, poison)]
    outcomes = rig.language(*rows)
    assert [o.token_id for o in outcomes] == [*(tokens[1] for tokens in expected(model_dir)), None]
    rig.worker.faults.arm("eng.mid_step", "off")
    outcomes = rig.language(*(rig.row(r, r.num_prompt + 1, [-1], 2) for r in made))
    assert [o.token_id for o in outcomes] == [tokens[2] for tokens in expected(model_dir)]


@pytest.mark.quick("[llava")
def test_a_preempted_request_goes_on_in_another_slot(rig: Rig, model_dir: Path) -> None:
    made = requests(rig, 20)
    first = made[1]
    head = rig.generate_ahead(*made, steps=3)
    rig.move(first)
    tokens = [*first.prompt_token_ids, *head[1]]
    others = [request for request in made if request is not first]
    rows = [rig.row(first, 0, tokens, 3, decode=False), *(rig.row(r, r.num_prompt + 2, [-1], 3) for r in others)]
    assert rig.language(*rows)[0].token_id == expected(model_dir)[1][3]
    rows = [rig.row(request, request.num_prompt + 3, [-1], 4) for request in made]
    assert [o.token_id for o in rig.language(*rows)] == [tokens[4] for tokens in expected(model_dir)]


@pytest.mark.quick("[llava")
def test_one_send_a_replay_and_two_an_eager_step(rig: Rig, device: LateDevice) -> None:
    made = requests(rig, 20)
    device.sent.clear()
    rig.language(*(rig.row(request, 0, request.prompt_token_ids, 0) for request in made))
    assert len(device.sent) == 1
    rig.language(*(rig.row(request, request.num_prompt, [-1], 1) for request in made))
    assert len(device.sent) == 2 and device.sent[-1] == 2 and len(device.replays) == 1


def test_recurrent_states_change_places_between_replays(tmp_path: Path, device: LateDevice) -> None:
    """The fourth row of three requests is padding and keeps no state."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    make_tiny("qwen3_5_text", tmp_path, seed=7, text={"num_hidden_layers": 4, **heads, **sizes})
    plain, rig = make_rig(tmp_path, "reference"), graph_rig(tmp_path, device, num_seq_slots=6, cuda_graph_sizes=(4,))
    made = [make_request(number, prompt) for number, prompt in enumerate((range(10, 40), [9], range(50, 57)), 1)]
    answers = []
    for one, generate in ((plain, plain.generate), (rig, rig.generate_ahead)):
        for request in made:
            one.add(request)
        answers.append(generate(*made))
    assert answers[0] == answers[1] and len(device.replays) == 7
    graphs = rig.worker._language.graphs.decodes
    assert graphs is not None and graphs._parts.states is not None
    cache = graphs._parts.states.cache
    for states in cache.conv, cache.recurrent:
        unwritten = states.isnan().flatten(1).any(1)
        assert sorted(unwritten[:12].view(6, 2).sum(1).tolist()) == [0, 0, 0, 2, 2, 2]
        assert len(unwritten) > 12 and unwritten[12:].all()  # snapshots, of which these plans name none
    plain.worker.close()
    rig.worker.close()


# ---- what is captured


@pytest.mark.quick("[llava")
def test_the_largest_is_captured_first_and_all_of_them_for_every_partition(model_dir: Path) -> None:
    device, seen = LateDevice(num_partitions=2), list[tuple[int, int]]()
    rig = make_rig(model_dir, "reference", num_seq_slots=6, asynchronous=True, device=device)
    rig.worker.capture_graphs(lambda done, total: seen.append((done, total)))
    graphs, encodes = rig.worker._language.graphs, rig.worker._vision.graphs
    assert graphs is not None and encodes is not None
    mixed = [(tokens, 6) for tokens in (512, 384, 256, 128, 64, 32, 16)]
    assert [graphs._order[number] for _, number in graphs.capture_order] == [*mixed, 6, 4, 2, 1] * 2
    total = 22 + len(encodes.capture_order)
    assert seen == [(done, total) for done in range(1, total + 1)]
    assert graphs.special._inputs is not None  # which all sizes share, as the counts of tokens
    tables = *graphs.special._inputs, graphs.special._slot_table.counts(0)
    assert rig.worker.graph_bytes == 1000 * (total + 22) + sum(table.nbytes for table in tables)
    device.replays.clear()
    device.partitions.here = 1
    rig.add(request := make_request(1, [5, 6, 7]))
    rig.generate_ahead(request, steps=3)
    assert device.replays == [1, 1, 1]
    rig.worker.close()


def test_capturing_leaves_nothing_behind(model_dir: Path) -> None:
    rig = make_rig(model_dir, "reference", asynchronous=True, device=LateDevice(), num_seq_slots=4)
    before = rig.kv_cache.data.view(torch.int32).clone()
    rig.worker.warm_up(lambda done, total: None)
    rig.worker.capture_graphs(lambda done, total: None)
    assert torch.equal(rig.kv_cache.data.view(torch.int32), before)
    rig.worker.close()


@pytest.mark.quick("[llava")
def test_a_step_that_no_graph_fits_is_launched_op_by_op(model_dir: Path) -> None:
    """Steps run op by op if they have more rows than the largest graph, or a context longer than graphs read."""
    device = LateDevice()
    rig = graph_rig(model_dir, device, cuda_graph_sizes=(2,))
    made = requests(rig, 20)
    assert rig.generate_ahead(*made) == expected(model_dir)
    assert not device.replays
    assert rig.generate(*made[:2], steps=1)  # begin anew
    device.replays.clear()
    rows = [rig.row(request, request.num_prompt, [-1], 1) for request in made[:2]]
    assert [o.token_id for o in rig.language(*rows)] == [tokens[1] for tokens in expected(model_dir)[:2]]
    assert len(device.replays) == 1
    graphs = rig.worker._language.graphs.decodes
    assert graphs is not None
    graphs._max_model_len = made[0].num_prompt + 1
    rows = [rig.row(request, request.num_prompt + 1, [-1], 2) for request in made[:2]]
    assert [o.token_id for o in rig.language(*rows)] == [tokens[2] for tokens in expected(model_dir)[:2]]
    assert len(device.replays) == 1
    rig.worker.close()


def test_ops_that_plan_from_contents_are_not_captured(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig(model_dir, "native", asynchronous=True, device=LateDevice(), num_seq_slots=4)
    with caplog.at_level(logging.INFO):
        rig.worker.capture_graphs(lambda done, total: pytest.fail("something was captured"))
    assert "not captured" in caplog.text and rig.worker.graph_bytes == 0
    (note,) = rig.worker.notes
    assert "launched op by op: plan_mixed" in note
    rig.add(request := make_request(1, [5, 6, 7]))
    assert len(rig.generate_ahead(request)[0]) == 8
    rig.worker.close()


@pytest.mark.quick("[llava")
def test_a_capture_that_fails_says_what_to_change(model_dir: Path) -> None:
    class Failing(LateDevice):
        def capture(self, launch: Any) -> Any:
            raise RuntimeError("an op that cannot be captured")

    rig = make_rig(model_dir, "reference", asynchronous=True, device=Failing(), num_seq_slots=4)
    with pytest.raises(BackendError, match="enforce_eager"):
        rig.worker.capture_graphs(lambda done, total: None)
    rig.worker.close()


@pytest.mark.quick("[llava")
@pytest.mark.parametrize("max_tokens", [0, 70, 300])
def test_graphs_that_do_not_fit_are_left_out_and_requests_served(model_dir: Path, max_tokens: int) -> None:
    """The largest first."""

    class Small(LateDevice):
        def capture(self, launch: Any) -> Any:
            graph = super().capture(launch)
            if seen and seen[-1] > max_tokens:
                raise torch.OutOfMemoryError("no room for a pool")
            return graph

    device, seen = Small(), list[int]()  # tokens of steps
    rig = make_rig(model_dir, "reference", asynchronous=True, device=device, num_seq_slots=8, cuda_graph_sizes=SIZES)
    rig.worker._vision.graphs = None
    forward = rig.model.forward

    def watched(inputs: LanguageInput, *caches: Any) -> Tensor:
        seen.append(inputs.slots.shape[0])
        logits: Tensor = forward(inputs, *caches)
        return logits

    rig.model.forward = watched
    rig.worker.capture_graphs(lambda done, total: None)
    graphs = rig.worker._language.graphs
    assert graphs is not None
    assert [size.tokens for _, size in [*graphs.mixed._captured][::-1]] == {
        0: [],
        70: [16, 32, 64],
        300: [16, 32, 64, 128, 256],
    }[max_tokens]
    assert bool(graphs.decodes._captured) == (max_tokens > 0)
    number = len(graphs.capture_order) - len(graphs.mixed._captured) - len(graphs.decodes._captured)
    (note,) = rig.worker.notes
    assert note.startswith(f"{number} graphs of language steps are left out, the device has no memory for them")
    device.replays.clear()
    made = requests(rig, 20, special=True)
    assert rig.generate_ahead(*made, chunk=40) == expected(model_dir, special=True)
    assert bool(device.replays) == (max_tokens > 0)
    assert device.trims
    rig.worker.close()


def test_sizes() -> None:
    assert default_sizes(1) == (1,)
    assert default_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert default_sizes(64) == (1, 2, 4, *range(8, 65, 8))
    assert default_sizes(256) == (1, 2, 4, *range(8, 128, 8), *range(128, 257, 16))
    assert default_sizes(1024)[-3:] == (896, 960, 1024) and len(default_sizes(1024)) == 43
    assert EngineConfig(cuda_graph_sizes=("8,2", "4", 2)).cuda_graph_sizes == (2, 4, 8)  # type: ignore[arg-type]
    for wrong in (("x",), (0,), (4097,), ("",), tuple(range(1, 300))):
        with pytest.raises(ConfigError, match="cuda_graph_sizes"):
            EngineConfig(cuda_graph_sizes=wrong)  # type: ignore[arg-type]


def test_positions_that_were_reserved_stay_where_they_are(rig: Rig) -> None:
    """A graph reads the table that it was captured with, which must not be given away when a longer one is made."""
    table = RotaryTable(rig.spec.language, torch.device("cpu"))
    table.reserve(100)
    reserved = table.with_rows(100)
    axes = () if rig.spec.language.rope_sections is None else (3,)
    far = torch.full((*axes, 1), 5000)
    table(far, 5001)
    grown = table.with_rows(100)
    assert grown is not reserved and any(kept is reserved for kept in table._reserved)
    assert np.array_equal(grown[: len(reserved)].numpy(), reserved.numpy())

"""Blocks of another node that come to a device, or from one: through pinned host memory, in parts of its size."""

from __future__ import annotations

import pytest
import torch

from hydra_engine.backend.select import create_backend
from hydra_engine.core.pools import PoolKind
from hydra_engine.transfer.plans import StagingJob, StagingResult
from hydra_engine.worker import transfer
from tests.emulated.streams import Streams
from tests.nodes.blocks import POISON, Side, pull, sides

KINDS = tuple(PoolKind)


@pytest.mark.parametrize(("source", "target"), [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")])
def test_blocks_of_another_node_arrive(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, source: str, target: str
) -> None:
    monkeypatch.setattr(transfer, "LANDING_BYTES", 1)  # one block of the larger kind
    backends = (create_backend(device, torch.float32, threads=1) for device in (source, target))
    with sides(*backends) as (owner, reader):
        streams.serving = True
        for kind in KINDS:
            staged = reader.exchange.piece_blocks("source", kind)
            assert bool(staged) == (source == "cuda"), "a device's blocks are staged in host memory first"
            blocks, to = (3, 4, 5, 30, 12), (39, 0, 1, 2, 20)
            if staged:
                places = (6, 7, 0, 2, 1)
                owner.exchange.submit_staging(StagingJob(5, kind, blocks, places))
                assert owner.result() == StagingResult(5)
            assert pull(reader, "source", kind, places if staged else blocks, to).valid
            assert_arrived(owner, reader, kind, blocks, to)
            owner.exchange.set_word(3, 0)
            result = pull(reader, "source", kind, [0], [0])
            assert not result.valid and result.problem is None
            owner.exchange.set_word(3, 17)
        streams.serving = False


def assert_arrived(owner: Side, reader: Side, kind: PoolKind, blocks: tuple[int, ...], to: tuple[int, ...]) -> None:
    found, expected = reader.rows(kind), owner.rows(kind)
    assert (found[list(to)] == expected[list(blocks)]).all()
    found[list(to)] = POISON
    assert (found == POISON).all(), "nothing else was written"


def test_a_device_that_fails_while_blocks_arrive_ends_its_worker_and_no_pull_waits(streams: Streams) -> None:
    with sides(create_backend("cpu", torch.float32, threads=1), create_backend("cuda", torch.float32, threads=1)) as (
        _,
        reader,
    ):
        reader.exchange._lane.close()  # as a lane that a device's failure has ended takes no job
        result = pull(reader, "source", PoolKind.KV, [1], [2])
        assert not result.valid and "could not be copied; the log says why" in (result.problem or "")

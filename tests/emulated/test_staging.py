"""Blocks between devices, and between a device and a processor: which are mapped, which go through host memory."""

from __future__ import annotations

import logging

import pytest
import torch

from hydra_engine.backend.base import Backend
from hydra_engine.backend.select import create_backend
from hydra_engine.core.pools import PoolKind
from tests.emulated.conftest import assert_clean
from tests.emulated.cuda import NO_PEER_ACCESS
from tests.emulated.streams import Streams
from tests.worker.staging import BLOCK_BYTES, moves_blocks, pull, sides


def on(device: str) -> Backend:
    return create_backend(device, torch.float32, threads=1)


@pytest.mark.parametrize(
    ("source", "target", "through_host"), [("cuda", "cuda", True), ("cuda", "cpu", False), ("cpu", "cuda", True)]
)
def test_blocks_arrive_through_host_memory(streams: Streams, source: str, target: str, through_host: bool) -> None:
    """Copies to the host arrive late, so a piece of which its source did not wait for the end is garbage."""
    options = {"through_host": through_host, "staging_bytes": 8 * BLOCK_BYTES}
    with sides(on(source), on(target), **options) as pair:
        streams.serving = True
        moves_blocks(*pair)
        streams.serving = False


@pytest.mark.parametrize("access", [True, False])
def test_devices_map_each_other_where_they_can(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, access: bool
) -> None:
    if not access:
        monkeypatch.setenv(NO_PEER_ACCESS, "1")
    with caplog.at_level(logging.WARNING), sides(on("cuda"), on("cuda"), staging_bytes=8 * BLOCK_BYTES) as pair:
        if access:
            assert pair[1].exchange.piece_blocks("source", PoolKind.KV) == 0
            assert pull(pair[1], (30,), (2,)).valid and not caplog.text
        else:
            moves_blocks(*pair)
            assert "blocks of instance source come through host memory: a peer's memory cannot be" in caplog.text


def test_a_device_reads_the_memory_of_a_processor_where_it_is(streams: Streams) -> None:
    with sides(on("cpu"), on("cuda")) as (source, target):
        assert target.exchange.piece_blocks("source", PoolKind.KV) == 0
        assert pull(target, (30, 31), (2, 5)).valid
        assert torch.equal(target.cache.data.cpu()[[2, 5]], source.cache.data[[30, 31]])
    assert_clean(streams)

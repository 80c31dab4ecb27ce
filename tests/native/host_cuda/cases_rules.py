"""The executor: it runs what keeps the rules and says what breaks one. What only a sanitizer sees ends the process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.native.host_cuda.conftest import MODULE_VARIABLE

INVALID_CONFIGURATION, INVALID_VALUE, INVALID_HANDLE = 9, 1, 400
LIMIT = 2**31 - 1


@pytest.mark.parametrize("lanes", [1, 2, 8, 32])
@pytest.mark.parametrize("threads", [32, 256, 1024])
def test_lanes_meet_in_groups(host: Any, lanes: int, threads: int) -> None:
    for _ in range(2):  # forwards and backwards
        sums = host.run_rule("sum_groups", threads, [lanes] + [0] * threads)[1:]
        assert sums == [lanes * (i // lanes * lanes) + lanes * (lanes - 1) // 2 for i in range(threads)]


@pytest.mark.parametrize("threads", [1, 33, 1024])
def test_all_threads_meet_at_a_barrier(host: Any, threads: int) -> None:
    for _ in range(2):
        words = host.run_rule("all_meet", threads, [0] * threads)
        assert words == [7 * ((i + 1) % threads) for i in range(threads)]


@pytest.mark.parametrize(
    ("kernel", "threads", "word", "message"),
    [
        ("one_lane_leaves", 64, 37, r"lane \d+ of warp 1 .*0xffffffff, but lane 5 of warp 1 has left the kernel"),
        ("one_lane_leaves", 40, 99, "mask 0xffffffff, but the block has no lane 8 of warp 1"),
        ("mask_without_itself", 32, 0xFFFF, r"lane \d+ of warp 0 shuffles with mask 0xffff, which does not name it"),
        ("masks_differ", 32, 0, r"shuffles with mask 0xffffffff, but lane \d+ of warp 0 has left the kernel"),
        ("partner_outside", 32, 1, "reads lane 1, which mask 0x55555555 does not name"),
        ("partner_outside", 32, 32, "reads lane 32, which mask"),
        ("some_meet", 64, 63, "thread 62 waits at __syncthreads, but thread 63 has left the kernel"),
        ("half_meets", 32, 0, "no thread of the block can go on; lane 0 of warp 0 waits at __syncthreads"),
        ("reads_what_it_writes", 4, 0, "reads_what_it_writes: memory that was read through __ldg was written"),
    ],
)
def test_a_broken_rule_is_a_sentence(host: Any, kernel: str, threads: int, word: int, message: str) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            host.run_rule(kernel, threads, [word] + [0] * 128)
        assert re.search(message, str(raised.value))
    assert host.run_rule("all_meet", 3, [0, 0, 0]) == [7, 14, 0]


@pytest.mark.parametrize(
    ("grid", "block", "shared", "error"),
    [
        ((1, 1, 1), (256, 1, 1), 0, 0),
        ((3, 2, 2), (8, 8, 8), 48 << 10, 0),
        ((0, 1, 1), (256, 1, 1), 0, INVALID_CONFIGURATION),
        ((1, 0, 1), (256, 1, 1), 0, INVALID_CONFIGURATION),
        ((LIMIT + 1, 1, 1), (32, 1, 1), 0, INVALID_CONFIGURATION),
        ((1, 65536, 1), (32, 1, 1), 0, INVALID_CONFIGURATION),
        ((1, 1, 65536), (32, 1, 1), 0, INVALID_CONFIGURATION),
        ((1, 1, 1), (0, 1, 1), 0, INVALID_CONFIGURATION),
        ((1, 1, 1), (513, 1, 1), 0, INVALID_CONFIGURATION),  # its bound is 512
        ((1, 1, 1), (1, 1, 65), 0, INVALID_CONFIGURATION),
        ((1, 1, 1), (32, 1, 1), (48 << 10) + 1, INVALID_VALUE),
    ],
)
def test_launches_have_cudas_limits(
    host: Any, grid: tuple[int, ...], block: tuple[int, ...], shared: int, error: int
) -> None:
    assert host.try_launch(grid, block, shared, 0) == error
    assert len(host.take_launches()) == (error == 0)


def test_a_stream_belongs_to_a_device(host: Any) -> None:
    streams = [host.new_stream(device, False) for device in (0, 1)]
    errors = [host.try_launch((1, 1, 1), (1, 1, 1), 0, stream) for stream in streams]
    for stream in streams:
        host.end_stream(stream)
    assert errors == [0, INVALID_HANDLE]


@pytest.mark.parametrize(
    ("kernel", "words", "message"),
    [
        ("misaligned_store", [0] * 32, "rules.cu:.*store to misaligned address .*requires 16 byte alignment"),
        ("misaligned_load", [0] * 32, "misaligned address .*requires 16 byte alignment"),
        ("beyond_the_end", [29] + [0] * 31, "heap-buffer-overflow(.|\n)*beyond_the_end"),
    ],
)
def test_the_sanitizers_see_what_kernels_touch(kernel: str, words: list[int], message: str) -> None:
    code = (
        "import importlib.util as u\n"
        f"spec = u.spec_from_file_location('host_cuda', {os.environ[MODULE_VARIABLE]!r})\n"
        "m = u.module_from_spec(spec); spec.loader.exec_module(m)\n"
        f"m.run_rule({kernel!r}, 4, {words})\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and re.search(message, done.stderr), done.stderr

"""Host work of the CUDA backend, without a device: layouts of copies, splits of steps, sentences."""

import numpy as np
import pytest
import torch

from hydra_engine.backend.cuda import copies as cuda_copies
from hydra_engine.backend.cuda.attention import num_leading_decodes
from hydra_engine.backend.cuda.copies import ALIGNMENT, fill, layout_of, views
from hydra_engine.backend.cuda.device import CudaDevice
from hydra_engine.backend.cuda.lanes import PRIORITIES, priorities, priority_note
from hydra_engine.core.options import NICENESS
from hydra_engine.core.pools import PoolExport, PoolKind, PoolLayout
from hydra_engine.errors import BackendError, TransferError
from hydra_kernels import _common

ARRAYS = [
    np.arange(7, dtype=np.int32),
    np.array([True, False, True]),
    np.zeros((0, 3), dtype=np.int64),
    np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2],
    np.array(-5, dtype=np.int64),
    np.asfortranarray(np.arange(6, dtype=np.float16).reshape(2, 3)),
    np.broadcast_to(np.uint8(9), (33,)),
]


def test_parts_come_back_from_one_buffer_as_they_were() -> None:
    for arrays in (ARRAYS, ARRAYS[2:3], ARRAYS[::-1], []):
        parts, num_bytes = layout_of(arrays)
        assert num_bytes % ALIGNMENT == 0 and all(part.offset % ALIGNMENT == 0 for part in parts)
        memory = np.full(num_bytes + 64, 255, dtype=np.uint8)
        fill(memory, parts, arrays)
        assert (memory[num_bytes:] == 255).all()
        for array, tensor in zip(arrays, views(torch.from_numpy(memory), parts), strict=True):
            assert tuple(tensor.shape) == array.shape and np.array_equal(tensor.numpy(), array)
            assert tensor.numpy().dtype == array.dtype


def test_parts_do_not_overlap_and_waste_less_than_an_alignment_each() -> None:
    parts, num_bytes = layout_of(ARRAYS)
    ends = [0, *(part.end for part in parts)]
    assert all(0 <= part.offset - end < ALIGNMENT for part, end in zip(parts, ends, strict=False))
    assert 0 <= num_bytes - ends[-1] < ALIGNMENT


def test_a_type_that_tensors_do_not_have_is_named() -> None:
    with pytest.raises(ValueError, match=r"arrays\[1\]: expected one of bool, .* got complex64"):
        layout_of([ARRAYS[0], np.zeros(2, dtype=np.complex64)])


@pytest.mark.parametrize(
    ("counts", "decodes"),
    [([], 0), ([1], 1), ([1, 1, 1], 3), ([4], 0), ([1, 1, 5, 1], 2), ([0, 1], 0), ([1, 0, 1], 1), ([3, 1, 1], 0)],
)
def test_decodes_are_the_rows_of_one_query_that_come_first(counts: list[int], decodes: int) -> None:
    assert num_leading_decodes(np.array([0, *np.cumsum(counts)], dtype=np.int32)) == decodes


def test_what_cuda_says_becomes_one_line_without_its_advice() -> None:
    said = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported\n"
    failed = cuda_copies.failure(torch.device("cuda", 1), RuntimeError(said))
    assert isinstance(failed, BackendError)
    assert failed.message == "the device cuda:1 failed: CUDA error: an illegal memory access was encountered"
    assert len(cuda_copies.failure(torch.device("cuda", 0), RuntimeError("x" * 900)).message) < 200
    assert cuda_copies.failure(torch.device("cuda", 0), RuntimeError()).message.endswith("RuntimeError")


def test_every_priority_of_lanes_has_a_meaning_here() -> None:
    assert PRIORITIES.keys() == NICENESS.keys()
    assert all(value <= 0 for lanes in PRIORITIES.values() for value in lanes.values())


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_no_lane_goes_first_where_kernels_begin_early(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """Launches of the package and streams of the lanes draw the line at the same capability."""
    monkeypatch.setattr(_common, "INTERPRETING", False)
    monkeypatch.setattr(_common, "capability_of", lambda device: 10 * capability[0] + capability[1])
    begins_early = _common.dependent_launch(torch.device("cuda", 0))["launch_pdl"]
    assert begins_early == (capability >= (9, 0))
    for mode, wanted in PRIORITIES.items():
        found, note = priorities(mode, capability), priority_note(mode, capability)
        assert found == ({} if begins_early else wanted)
        assert (note is None) == (found == wanted), "it is said where a lane was to go first"
        if note is not None:
            assert note.startswith(f"lane priority {mode}: both models have the same on this GPU")


def test_a_processor_has_no_streams() -> None:
    assert (priorities("balanced", None), priority_note("balanced", None)) == ({}, None)


def test_a_device_is_not_touched_before_it_is_used() -> None:
    """`doctor` makes one to ask its ops."""
    device = CudaDevice(3, 1)
    assert (device.name, device.torch_device, device.partitions.count) == ("cuda:3", torch.device("cuda", 3), 1)
    with device.partitions.use(device.partitions.current()):
        pass
    with pytest.raises(ValueError, match="partition: expected 0, the device is not divided, got 1"):
        device.partitions.use(1)
    layout = PoolLayout(PoolKind.KV, 1, (1, 2, 1, 1, 4), "float32", 32)
    with pytest.raises(TransferError, match="'other' cannot be mapped by a GPU"):
        device.open_peer(PoolExport(layout, "other", 32), -1)
    assert not torch.cuda.is_initialized()

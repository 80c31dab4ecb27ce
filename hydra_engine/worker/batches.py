"""Plans -> model inputs: numpy arrays built in one go, one tensor per array.

Slot of position p: `block_ids[p // S] * S + p % S`. Does not know requests, models or sampling; allocates no block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.backend.base import Ops
from hydra_engine.core.media import ImageItem, PixelPayload
from hydra_engine.core.plans import BlockIds, EncodeItem, LanguageRow
from hydra_engine.models.inputs import LanguageInput, States, VisionInput
from hydra_engine.worker.positions import PromptPositions
from hydra_engine.worker.states import StateTable

Int64s = npt.NDArray[np.int64]


def feature_slots(block_ids: BlockIds, offset: int, count: int, block_size: int) -> Int64s:
    """Slots of rows [offset, offset + count) of what lies in `block_ids`."""
    rows = np.arange(offset, offset + count)
    return block_ids[rows // block_size].astype(np.int64) * block_size + rows % block_size


def language_input(
    rows: Sequence[LanguageRow],
    ops: Ops,
    *,
    block_size: int,
    image_block_size: int,
    device: torch.device,
    rope: Sequence[PromptPositions] | None = None,
    states: StateTable | None = None,
) -> LanguageInput:
    """At least one row, each with at least one token. `rope` has the rows' multimodal rotary positions, for models that
    have them."""
    num_rows = len(rows)
    counts = np.fromiter((len(row.token_ids) for row in rows), dtype=np.int64, count=num_rows)
    starts = np.fromiter((row.start for row in rows), dtype=np.int64, count=num_rows)
    cu_q = np.zeros(num_rows + 1, dtype=np.int32)
    np.cumsum(counts, out=cu_q[1:])
    num_context = starts + counts
    tables = _block_tables(rows, -(-num_context // block_size))

    num_tokens = int(cu_q[-1])
    token_ids = np.fromiter(chain.from_iterable(row.token_ids for row in rows), dtype=np.int64, count=num_tokens)
    if num_tokens == num_rows:  # decodes only
        row_of_token, places = np.arange(num_rows), starts
    else:
        row_of_token = np.repeat(np.arange(num_rows), counts)
        places = np.arange(num_tokens) + np.repeat(starts - cu_q[:-1], counts)
    positions = places if rope is None else _rope_positions(rows, rope)
    block_ids = tables[row_of_token, places // block_size].astype(np.int64)
    slots = block_ids * block_size + places % block_size
    sampled = np.fromiter((row.sample for row in rows), dtype=np.bool_, count=num_rows)
    logit_rows = (cu_q[1:][sampled] - 1).astype(np.int64)
    image_rows, image_slots = _image_merges(rows, cu_q, image_block_size, device)
    plan = ops.plan_attention(
        torch.from_numpy(cu_q), torch.from_numpy(num_context.astype(np.int32)), torch.from_numpy(tables)
    )
    return LanguageInput(
        token_ids=_tensor(token_ids, device),
        positions=_tensor(positions, device),
        slots=_tensor(slots, device),
        attention=plan,
        logit_rows=_tensor(logit_rows, device),
        position_end=int(positions.max()) + 1,
        image_rows=image_rows,
        image_slots=image_slots,
        states=None if states is None else States(states.cache, states.rows(rows)),
    )


def _rope_positions(rows: Sequence[LanguageRow], rope: Sequence[PromptPositions]) -> Int64s:
    """[3, T]"""
    if all(row.is_decode for row in rows):
        place = np.fromiter((row.start + known.delta for row, known in zip(rows, rope, strict=True)), dtype=np.int64)
        return np.broadcast_to(place, (3, len(rows))).copy()
    pieces = [known.of(row.start, len(row.token_ids)) for row, known in zip(rows, rope, strict=True)]
    return np.concatenate(pieces, axis=1)


def _block_tables(rows: Sequence[LanguageRow], num_blocks: Int64s) -> BlockIds:
    """[B, max blocks] with the blocks that hold each row's context; zeros behind."""
    width = int(num_blocks.max())
    tables = np.zeros((len(rows), width), dtype=np.int32)
    assert all(row.num_blocks >= n for row, n in zip(rows, num_blocks.tolist(), strict=True)), "plan lacks blocks"
    used = np.concatenate([row.block_ids[:n] for row, n in zip(rows, num_blocks.tolist(), strict=True)])
    tables[np.arange(width) < num_blocks[:, None]] = used
    return tables


def _image_merges(
    rows: Sequence[LanguageRow], cu_q: npt.NDArray[np.int32], image_block_size: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Which rows of the step take image features and from which slots of the image cache."""
    targets: list[Int64s] = []
    sources: list[Int64s] = []
    for index, row in enumerate(rows):
        for piece in row.images:
            assert piece.row + piece.count <= len(row.token_ids), "image slice reaches beyond its chunk"
            first = int(cu_q[index]) + piece.row
            targets.append(np.arange(first, first + piece.count))
            sources.append(feature_slots(piece.block_ids, piece.offset, piece.count, image_block_size))
    if not targets:
        return None, None
    return _tensor(np.concatenate(targets), device), _tensor(np.concatenate(sources), device)


def vision_input(
    items: Sequence[EncodeItem],
    images: Sequence[ImageItem],
    payloads: Sequence[PixelPayload],
    *,
    block_size: int,
    device: torch.device,
) -> VisionInput:
    """`images[i]` and `payloads[i]` belong to `items[i]`."""
    slots = np.concatenate([feature_slots(item.block_ids, 0, item.num_tokens, block_size) for item in items])
    plain = not payloads[0].arrays
    return VisionInput(
        pixels=tuple(_pictures(payload, device) for payload in payloads) if plain else (),
        sources=tuple((image.width, image.height) for image in images),
        grids=tuple(image.grid for image in images),
        slots=_tensor(slots, device),
        arrays=() if plain else tuple(_arrays(payload, device) for payload in payloads),
    )


def _pictures(payload: PixelPayload, device: torch.device) -> Tensor:
    """uint8 [pictures, height, width, 3]. Copied, because bytes are read-only."""
    flat = np.frombuffer(payload.data, dtype=np.uint8).copy()
    return _tensor(flat.reshape(payload.count, payload.height, payload.width, 3), device)


def _arrays(payload: PixelPayload, device: torch.device) -> dict[str, Tensor]:
    arrays, begin = {}, 0
    for layout in payload.arrays:
        dtype, count = np.dtype(layout.dtype), math.prod(layout.shape)
        values = np.frombuffer(payload.data, dtype=dtype, count=count, offset=begin).reshape(layout.shape)
        arrays[layout.name] = _tensor(values.copy(), device)
        begin += count * dtype.itemsize
    return arrays


def _tensor(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)

"""Paged caches on every implementation: copies bit for bit, poison, garbage slots, strides, empty calls, messages."""

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import Ops, PagedCache

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (blocks, layers, tensors, block size, heads, head dim)
KV_SHAPES = [(5, 3, 2, 4, 2, 8), (7, 1, 2, 16, 1, 33), (3, 2, 2, 1, 5, 64), (4, 2, 2, 3, 2, 80)]
IMAGE_SHAPES = [(3, 1, 1, 8, 1, 96), (4, 2, 1, 5, 1, 7)]


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> PagedCache:
    return PagedCache(torch.full(shape, float("nan"), dtype=dtype))


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fused_rows(tokens: int, counts: list[int], heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Views [T, count * heads, D] into one fused projection, as the models make them."""
    whole = random(tokens, sum(counts) * heads * dim, dtype=dtype)
    return [part.unflatten(-1, (-1, dim)) for part in whole.split([count * heads * dim for count in counts], dim=-1)]


def some_slots(cache: PagedCache, tokens: int, seed: int = 1) -> Tensor:
    return torch.randperm(cache.num_blocks * cache.block_size, generator=torch.Generator().manual_seed(seed))[:tokens]


def bits(x: Tensor) -> Tensor:
    """Comparable where NaN is not."""
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def slot_rows(cache: PagedCache, layer: int, tensor: int) -> Tensor:
    """[slots, H, D] of one plane, by plain indexing."""
    return cache.data[:, layer, tensor].flatten(0, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", KV_SHAPES + IMAGE_SHAPES, ids=str)
def test_written_rows_are_the_sources_bit_for_bit_and_nothing_else_changes(
    ops: Ops, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    cache = poisoned(shape, dtype)
    _, layers, tensors, _, heads, dim = shape
    slots = some_slots(cache, tokens=min(9, shape[0] * shape[3]))
    slots[1::3] = -1
    rows = fused_rows(len(slots), [1] * tensors, heads, dim, dtype)
    layer = layers - 1
    ops.write_cache(cache, layer, rows, slots)
    expected = poisoned(shape, dtype)
    for x, source in enumerate(rows):
        for t, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected.data[slot // shape[3], layer, x, slot % shape[3]] = source[t]
    assert torch.equal(bits(cache.data), bits(expected.data))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_writes_are_shared_among_threads(ops: Ops, threads: int, dtype: torch.dtype) -> None:
    cache = poisoned((64, 2, 2, 16, 4, 64), dtype)
    slots = some_slots(cache, 1000)
    k, v = fused_rows(1000, [1, 1], 4, 64, dtype)
    ops.write_cache(cache, 1, (k, v), slots)
    assert torch.equal(ops.gather_cache(cache, 1, 0, slots), k)
    assert torch.equal(ops.gather_cache(cache, 1, 1, slots), v)
    assert cache.data[:, 0].isnan().all()


def test_special_values_keep_their_bits(ops: Ops) -> None:
    cache = poisoned((1, 1, 2, 4, 1, 4), torch.float32)
    source = torch.tensor([0x7FC12345, -1, 0x00000001, -(2**31)], dtype=torch.int32).view(torch.float32).view(1, 1, 4)
    ops.write_cache(cache, 0, (source, source), torch.tensor([2]))
    assert torch.equal(bits(ops.gather_cache(cache, 0, 1, torch.tensor([2]))), bits(source))


@pytest.mark.quick("float32", "bfloat16", "avx", "amx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("shape", KV_SHAPES[:1] + KV_SHAPES[2:], ids=str)
def test_rotation_matches_float64_and_lands_in_the_cache(
    ops: Ops, dtype: torch.dtype, group: int, shape: tuple[int, ...]
) -> None:
    cache = poisoned(shape, dtype)
    _, layers, _, size, heads, dim = shape
    slots = some_slots(cache, tokens=min(7, shape[0] * size))
    slots[2] = -1
    q, k, v = fused_rows(len(slots), [group, 1, 1], heads, dim, dtype)
    angles = torch.rand(len(slots), dim, generator=torch.Generator().manual_seed(3)) * 100
    cos, sin = angles.cos()[:, ::2].contiguous(), angles.sin()[:, : dim // 2]
    sin = torch.cat((sin, sin), dim=-1)[:, : dim // 2]  # rows of a wider tensor
    rotated = ops.rope_and_write(q, k, v, (cos, sin), cache, layers - 1, slots)
    assert rotated.shape == q.shape and rotated.dtype == dtype and rotated.is_contiguous()
    assert_rotated(rotated, q, cos, sin)
    kept = slots >= 0
    assert_rotated(slot_rows(cache, layers - 1, 0)[slots[kept]], k[kept], cos[kept], sin[kept])
    assert torch.equal(slot_rows(cache, layers - 1, 1)[slots[kept]], v[kept])
    untouched = torch.ones(shape[0] * size, dtype=torch.bool)
    untouched[slots[kept]] = False
    assert slot_rows(cache, layers - 1, 0)[untouched].isnan().all()


def assert_rotated(result: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Allows twice the error of the float32 formula rounded once."""
    truth, plain = (rotate(x.to(d), cos.to(d), sin.to(d)) for d in (torch.float64, torch.float32))
    allowed = 2 * (plain.to(result.dtype).double() - truth).abs().max() + 1e-6
    assert (result.double() - truth).abs().max() <= allowed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def test_rotation_of_a_token_does_not_depend_on_its_neighbours(ops: Ops, threads: int) -> None:
    cache, other = (poisoned((40, 1, 2, 16, 4, 64), torch.bfloat16) for _ in range(2))
    slots = some_slots(cache, 600)
    q, k, v = fused_rows(600, [2, 1, 1], 4, 64, torch.bfloat16)
    cos, sin = random(600, 32, dtype=torch.float32), random(600, 32, dtype=torch.float32, seed=1)
    together = ops.rope_and_write(q, k, v, (cos, sin), cache, 0, slots)
    for begin, end in ((0, 1), (1, 18), (18, 600)):
        part = slice(begin, end)
        alone = ops.rope_and_write(q[part], k[part], v[part], (cos[part], sin[part]), other, 0, slots[part])
        assert torch.equal(alone, together[part])
    assert torch.equal(bits(cache.data), bits(other.data))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_image_features_replace_hidden_rows(ops: Ops, dtype: torch.dtype) -> None:
    cache = poisoned((3, 2, 1, 8, 1, 33), dtype)
    slots = some_slots(cache, 10)
    features = random(10, 1, 33, dtype=dtype)
    ops.write_cache(cache, 0, (features,), slots)
    hidden = random(25, 33, dtype=dtype, seed=5)
    rows = torch.randperm(25, generator=torch.Generator().manual_seed(7))[:10]
    expected = hidden.clone()
    expected[rows] = features[:, 0]
    ops.merge_image_tokens(hidden, rows, cache, slots)
    assert torch.equal(hidden, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 2, 1, 8, 1, 33), (60, 2, 1, 8, 1, 640)], ids=str)
def test_image_features_are_added_to_hidden_rows(
    ops: Ops, threads: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    cache, width = poisoned(shape, dtype), shape[5]
    count = shape[0] * shape[3] - 5
    slots = some_slots(cache, count)
    features = random(count, 1, width, dtype=dtype)
    ops.write_cache(cache, 1, (features,), slots)
    hidden = random(count + 15, width, dtype=dtype, seed=5) * 3
    rows = torch.randperm(count + 15, generator=torch.Generator().manual_seed(7))[:count]
    expected = hidden.clone()
    expected[rows] = (hidden[rows].float() + features[:, 0].float()).to(dtype)
    ops.merge_image_tokens(hidden, rows, cache, slots, plane=1)
    assert torch.equal(hidden, expected)


@pytest.mark.quick("float32", "bfloat16", "avx", "amx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plane", [0, 1])
def test_merges_leave_rows_without_a_slot_as_they_are(ops: Ops, dtype: torch.dtype, plane: int) -> None:
    cache = poisoned((4, 2, 1, 8, 1, 264), dtype)
    slots = some_slots(cache, 20)
    features = random(20, 1, 264, dtype=dtype)
    ops.write_cache(cache, plane, (features,), slots)
    hidden, rows = random(25, 264, dtype=dtype, seed=5), torch.randperm(25)[:20]
    given, kept = slots.clone(), torch.arange(20) % 3 > 0
    given[~kept] = -1
    whole, none = hidden.clone(), hidden.clone()
    ops.merge_image_tokens(whole, rows, cache, slots, plane)
    expected = hidden.clone()
    expected[rows[kept]] = whole[rows[kept]]
    ops.merge_image_tokens(hidden, rows, cache, given, plane)
    assert torch.equal(hidden, expected)
    ops.merge_image_tokens(none, rows, cache, torch.full((20,), -1), plane)
    assert torch.equal(none, random(25, 264, dtype=dtype, seed=5))


@pytest.mark.quick("float32", "bfloat16", "avx", "amx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathers_pass_over_rows_without_a_slot(ops: Ops, dtype: torch.dtype) -> None:
    cache = poisoned((7, 2, 2, 16, 2, 40), dtype)
    slots = some_slots(cache, 30)
    k, v = fused_rows(30, [1, 1], 2, 40, dtype)
    ops.write_cache(cache, 1, (k, v), slots)
    slots[::4] = -1
    gathered = ops.gather_cache(cache, 1, 1, slots)
    assert gathered.shape == v.shape and torch.equal(gathered[slots >= 0], v[slots >= 0])
    assert ops.gather_cache(cache, 1, 0, torch.tensor([-1])).shape == (1, 2, 40)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_blocks_move_with_all_layers(ops: Ops, threads: int, dtype: torch.dtype) -> None:
    source = PagedCache(random(6, 3, 2, 4, 2, 40, dtype=dtype))
    target = poisoned((9, 3, 2, 4, 2, 40), dtype)
    pairs = torch.tensor([[5, 0], [0, 8], [3, 4]])
    ops.copy_blocks(source, target, pairs)
    assert torch.equal(target.data[pairs[:, 1]], source.data[pairs[:, 0]])
    assert target.data[[1, 2, 3, 5, 6, 7]].isnan().all()


def test_blocks_copy_within_one_cache(ops: Ops) -> None:
    cache = PagedCache(random(4, 1, 2, 2, 1, 4, dtype=torch.float32))
    before = cache.data.clone()
    ops.copy_blocks(cache, cache, torch.tensor([[0, 2], [1, 3]]))
    assert torch.equal(cache.data[2:], before[:2]) and torch.equal(cache.data[:2], before[:2])


def test_empty_calls_do_nothing(ops: Ops) -> None:
    cache = poisoned((2, 1, 2, 4, 2, 8), torch.float32)
    image = poisoned((2, 2, 1, 4, 1, 8), torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    k = torch.empty(0, 2, 8)
    angles = torch.empty(0, 4)
    ops.write_cache(cache, 0, (k, k), none)
    assert ops.rope_and_write(torch.empty(0, 4, 8), k, k, (angles, angles), cache, 0, none).shape == (0, 4, 8)
    for plane in (0, 1):
        ops.merge_image_tokens(torch.empty(3, 8), none, image, none, plane)
    assert ops.gather_cache(cache, 0, 1, none).shape == (0, 2, 8)
    ops.copy_blocks(cache, cache, torch.empty(0, 2, dtype=torch.int64))
    assert cache.data.isnan().all()


def test_a_slot_that_does_not_exist_is_an_error_and_nothing_is_written(ops: Ops) -> None:
    cache = poisoned((2, 1, 2, 4, 1, 8), torch.float32)
    rows = torch.zeros(2, 1, 8)
    for bad in (8, -2, 2**40):
        with pytest.raises(ValueError, match="slots"):
            ops.write_cache(cache, 0, (rows, rows), torch.tensor([0, bad]))
        with pytest.raises(ValueError, match="slots"):
            ops.gather_cache(cache, 0, 0, torch.tensor([bad]))
    image = poisoned((2, 2, 1, 4, 1, 8), torch.float32)
    for plane in (0, 1):
        hidden = torch.zeros(3, 8)
        for bad in (8, -2):
            with pytest.raises(ValueError, match="slots"):
                ops.merge_image_tokens(hidden, torch.tensor([0, 1]), image, torch.tensor([0, bad]), plane)
        assert not hidden.any()
        with pytest.raises(ValueError, match="rows"):
            ops.merge_image_tokens(torch.zeros(3, 8), torch.tensor([3]), image, torch.tensor([0]), plane)
    with pytest.raises(ValueError, match="pairs"):
        ops.copy_blocks(cache, cache, torch.tensor([[0, 2]]))
    assert cache.data.isnan().all()


def test_wrong_arguments_are_named_with_what_was_expected(ops: Ops) -> None:
    cache = poisoned((2, 1, 2, 4, 2, 8), torch.float32)
    rows, slots = torch.zeros(3, 2, 8), torch.tensor([0, 1, 2])
    cases = {
        r"rows\[1\]: expected \[3, 2, 8\]": lambda: ops.write_cache(cache, 0, (rows, torch.zeros(3, 1, 8)), slots),
        r"rows\[0\]: expected .*float32.*bfloat16": lambda: ops.write_cache(cache, 0, (rows.bfloat16(), rows), slots),
        r"rows\[0\]: .*dense": lambda: ops.write_cache(cache, 0, (torch.zeros(3, 8, 2).mT, rows), slots),
        r"slots: expected .*int64.*int32": lambda: ops.write_cache(cache, 0, (rows, rows), slots.int()),
        r"cache: expected 1 tensors per layer, got 2": lambda: ops.write_cache(cache, 0, (rows,), slots),
        r"layer: expected 0 to 0, got 1": lambda: ops.write_cache(cache, 1, (rows, rows), slots),
        r"index: expected 0 to 1, got 2": lambda: ops.gather_cache(cache, 0, 2, slots),
        r"hidden: expected": lambda: ops.merge_image_tokens(
            torch.zeros(3, 7), slots, poisoned((2, 1, 1, 4, 1, 8), torch.float32), slots
        ),
        r"cos: expected \[3, 4\]": lambda: ops.rope_and_write(
            rows, rows, rows, (torch.zeros(3, 8), torch.zeros(3, 4)), cache, 0, slots
        ),
        r"pairs: expected": lambda: ops.copy_blocks(cache, cache, slots),
        r"target: expected": lambda: ops.copy_blocks(
            cache, poisoned((2, 1, 2, 4, 2, 9), torch.float32), torch.tensor([[0, 1]])
        ),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            call()

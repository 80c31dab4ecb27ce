"""Whether instances fit one device together, and what the refusal says would."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_engine.cluster.fit import Demand, check_memory
from hydra_engine.errors import ResourceError

GIB = 1 << 30


def refusal(demands: list[Demand], total_bytes: int) -> str:
    with pytest.raises(ResourceError) as caught:
        check_memory(demands, total_bytes)
    return caught.value.message


def test_what_fits_to_the_byte_is_taken() -> None:
    demands = [Demand("p0", 7, 3), Demand("d0", 7, 3)]
    check_memory(demands, 20)
    check_memory([], 0)
    assert "p0" in refusal(demands, 19)


def test_caches_that_are_too_large_come_with_the_share_that_fits() -> None:
    message = refusal([Demand("p0", 13 * GIB, 20 * GIB), Demand("d0", 13 * GIB, 20 * GIB)], 46 * GIB)
    assert message == (
        "the instances of one device need 66 GiB, and it has 46 GiB (weights + caches: p0 13 GiB + 20 GiB, "
        "d0 13 GiB + 20 GiB); beside the weights 20 GiB are left for caches: lower kv_cache_gib and image_cache_gib "
        "(or the numbers of blocks) to 50 % of what they are"
    )


def test_weights_that_are_too_large_come_with_the_instances_that_fit() -> None:
    demands = [Demand(f"pd{i}", 13 * GIB, GIB) for i in range(12)]
    message = refusal(demands, 30 * GIB)
    assert "4 others" in message and message.endswith("smaller dtype; pd0, pd1 would fit")
    assert refusal(demands, GIB).endswith("take fewer instances or a smaller dtype")


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=6), st.integers(1, 400))
def test_what_the_message_says_would_fit_does(sizes: list[tuple[int, int]], total: int) -> None:
    demands = [Demand(f"i{n}", weights * GIB, caches * GIB) for n, (weights, caches) in enumerate(sizes)]
    try:
        check_memory(demands, total * GIB)
    except ResourceError as error:
        if found := re.search(r"to (\d+) % of what", error.message):
            lower = [Demand(d.name, d.weights_bytes, d.cache_bytes * int(found[1]) // 100) for d in demands]
            check_memory(lower, total * GIB)
        elif found := re.search(r"; ([^;]+) would fit$", error.message):
            check_memory(demands[: len(found[1].split(", "))], total * GIB)

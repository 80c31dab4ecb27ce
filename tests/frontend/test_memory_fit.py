"""Instances that fit one device together or do not, and what the refusal suggests."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hydra_engine.core.reports import InstanceSummary
from hydra_engine.errors import ResourceError
from hydra_engine.frontend.routing.placement import check_fits

GIB = 1 << 30


def holds(name: str, weights_bytes: int, cache_bytes: int) -> InstanceSummary:
    zeros = {f: 0 for f in InstanceSummary.__struct_fields__ if InstanceSummary.__annotations__[f] in ("int", "float")}
    texts = dict.fromkeys(("role", "model", "family", "device", "dtype", "backend"), "cuda:0")
    sizes = {"weights_bytes": weights_bytes, "kv_cache_bytes": cache_bytes - cache_bytes // 2}
    rest = {"image_cache_bytes": cache_bytes // 2, "name": name, "deterministic": True}
    return InstanceSummary(**(zeros | texts | sizes | rest))


def check_memory(instances: list[InstanceSummary], total_bytes: int) -> None:
    check_fits(replace(instance, device_bytes=total_bytes) for instance in instances)


def refusal(instances: list[InstanceSummary], total_bytes: int) -> str:
    with pytest.raises(ResourceError) as caught:
        check_memory(instances, total_bytes)
    return caught.value.message


def test_what_fits_to_the_byte_is_taken() -> None:
    instances = [holds("p0", 7, 3), holds("d0", 7, 3)]
    check_memory(instances, 20)
    check_memory([], 0)
    assert "p0" in refusal(instances, 19)
    other = [replace(instance, device=instance.name) for instance in instances]
    check_memory(other, 10)


def test_caches_that_are_too_large_come_with_the_share_that_fits() -> None:
    message = refusal([holds("p0", 13 * GIB, 20 * GIB), holds("d0", 13 * GIB, 20 * GIB)], 46 * GIB)
    assert message == (
        "the instances of one device need 66 GiB, and it has 46 GiB (weights + caches: p0 13 GiB + 20 GiB, "
        "d0 13 GiB + 20 GiB); beside the weights 20 GiB are left for caches: lower --kv-cache-gib and "
        "--image-cache-gib (or the numbers of blocks) to 50 % of what they are"
    )


def test_weights_that_are_too_large_come_with_the_instances_that_fit() -> None:
    instances = [holds(f"pd{i}", 13 * GIB, GIB) for i in range(12)]
    message = refusal(instances, 30 * GIB)
    assert "4 others" in message and message.endswith("smaller --dtype; pd0, pd1 would fit")
    assert refusal(instances, GIB).endswith("fewer instances, --quantization int8 or int4 or a smaller --dtype")
    quantized = [replace(instance, quantization="int4") for instance in instances]
    assert refusal(quantized, GIB).endswith("take fewer instances or a smaller --dtype")


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=6), st.integers(1, 400))
def test_what_the_message_says_would_fit_does(sizes: list[tuple[int, int]], total: int) -> None:
    instances = [holds(f"i{n}", weights * GIB, caches * GIB) for n, (weights, caches) in enumerate(sizes)]
    try:
        check_memory(instances, total * GIB)
    except ResourceError as error:
        if found := re.search(r"to (\d+) % of what", error.message):
            lower = [holds(d.name, d.weights_bytes, d.cache_bytes * int(found[1]) // 100) for d in instances]
            check_memory(lower, total * GIB)
        elif found := re.search(r"; ([^;]+) would fit$", error.message):
            check_memory(instances[: len(found[1].split(", "))], total * GIB)

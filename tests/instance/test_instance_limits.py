"""Limits of single instances: which instance gets which, and how a wrong text is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from hydra_engine.core.instances import Role, Topology, role_of
from hydra_engine.errors import ConfigError
from hydra_planner.footprint import footprints

GIB = 1 << 30
LIMITS = ("token_budget", "max_num_seqs", "image_budget", "num_kv_blocks", "num_image_blocks")


def config(topology: str, limits: str | None, **scheduler: Any) -> EngineConfig:
    return EngineConfig(topology=topology, instance_limits=limits, scheduler=SchedulerConfig(**scheduler))


def test_a_role_limits_all_of_it_and_a_name_wins_over_its_role() -> None:
    all_of = config("E+2PD+D", "PD: token-budget=96, max_num_seqs=7 ; pd1:max_num_seqs=3; e0:image_budget=128;")
    first, second = (all_of.for_instance(name, Role.P | Role.D).scheduler for name in ("pd0", "pd1"))
    assert (first.token_budget, first.max_num_seqs) == (96, 7)
    assert (second.token_budget, second.max_num_seqs) == (96, 3)
    assert all_of.for_instance("e0", Role.E).scheduler == SchedulerConfig(image_budget=128)
    assert all_of.for_instance("d0", Role.D) is all_of  # a role, and not every instance that has its letters
    assert config("EPD", None).for_instance("epd0", Role.E | Role.P | Role.D).instance_limits is None


def test_letters_of_a_role_come_in_any_order() -> None:
    assert config("PD+E", "DP:max_num_seqs=2").for_instance("pd0", Role.P | Role.D).scheduler.max_num_seqs == 2


def test_a_size_of_an_instance_replaces_a_number_of_blocks_of_all() -> None:
    all_of = EngineConfig(
        topology="P+D+E", instance_limits="P:kv_cache_gib=0.5;d0:num_kv_blocks=9", cache=CacheConfig(num_kv_blocks=100)
    )
    cache = all_of.for_instance("p0", Role.P).cache
    assert (cache.kv_cache_gib, cache.num_kv_blocks) == (0.5, None)
    assert all_of.for_instance("d0", Role.D).cache.num_kv_blocks == 9
    named = EngineConfig(topology="P+D", instance_limits="D:num_kv_blocks=9;d0:kv_cache_gib=2")
    assert named.for_instance("d0", Role.D).cache == CacheConfig(kv_cache_gib=2.0)


@given(st.dictionaries(st.sampled_from(["EPD", "PD", "epd0", "pd0", "pd1"]), st.sampled_from(LIMITS), min_size=1))
def test_nothing_changes_but_what_is_named(keys: dict[str, str]) -> None:
    keys = {key: limit for key, limit in keys.items() if "E" in key.upper() or limit != "image_budget"} or {
        "PD": "max_num_seqs"
    }
    text = ";".join(f"{key}:{limit}=5" for key, limit in keys.items())
    all_of = config("EPD+2PD", text, token_budget=512)
    for name in Topology.parse("EPD+2PD").names:
        role = role_of(name)
        own, named = all_of.for_instance(name, role), {keys.get(name), keys.get(role.letters)}
        for limit in LIMITS:
            found, before = (getattr(c.cache if "blocks" in limit else c.scheduler, limit) for c in (own, all_of))
            assert found == (5 if limit in named else before), (name, limit)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "nothing is limited"),
        ("D", "'D' has no limits; write for example D:max_num_seqs=128"),
        ("D:", "'D:' has no limits"),
        ("d:max_num_seqs=1", "E+P+2D has no instance or role 'd'; the nearest one is D"),
        ("PD:max_num_seqs=1", "no instance or role 'PD'"),
        ("d2:max_num_seqs=1", "the nearest one is d1"),
        ("X9:max_num_seqs=1", "there are E, P, D, e0, p0, d0, d1"),
        ("D:max_nun_seqs=1", "D: there is no limit 'max_nun_seqs'; the nearest one is max_num_seqs"),
        ("D:max_queue=1", "there is no limit 'max_queue'"),
        ("D:max_num_seqs", "max_num_seqs has no value; write for example max_num_seqs=8"),
        ("D:max_num_seqs=0", "must be a whole number above 0, not '0'"),
        ("D:max_num_seqs=1.5", "must be a whole number above 0, not '1.5'"),
        ("D:kv_cache_gib=0", "must be a number of GiB above 0, not '0'"),
        ("D:kv_cache_gib=much", "must be a number of GiB above 0, not 'much'"),
        ("D:max_num_seqs=1,max_num_seqs=2", "max_num_seqs is given twice"),
        ("D:max_num_seqs=1;D:token_budget=2", "D is given twice"),
        ("D:image_budget=1", "image_budget changes nothing for an instance of role D"),
        ("e0:max_num_seqs=1", "max_num_seqs changes nothing for an instance of role E"),
    ],
)
def test_a_wrong_text_is_told_what_to_change(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config("E+P+2D", text)
    assert said in caught.value.message and caught.value.param == "instance_limits"
    assert "\n" not in caught.value.message


def test_the_memory_of_each_instance_follows_its_own_limits() -> None:
    """Devices are full: memory of one instance is missing for its neighbours."""
    on: dict[str, Any] = {"device": "cuda:0", "dtype": "bfloat16", "model": "llava-1.5-7b"}
    limited = EngineConfig(topology="EP+D", instance_limits="D:num_kv_blocks=128,max_num_seqs=4", **on)
    first, second = footprints(limited, 80 * GIB).instances
    assert (first.name, second.kv_tokens) == ("ep0", 128 * 16)
    alike, _ = footprints(EngineConfig(topology="EP+D", **on), 80 * GIB).instances
    assert first.kv_tokens > 1.5 * alike.kv_tokens
    assert first.plan.total_bytes + second.plan.total_bytes <= 80 * GIB

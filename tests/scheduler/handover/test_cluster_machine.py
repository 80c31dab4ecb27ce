"""Several schedulers, the smallest caches, any order of events, no timeouts: every request ends with its tokens.

Requests and what happens follow from one seed, so that most examples are crowded; hypothesis would make them small.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hydra_engine.config import ClusterConfig, SchedulerConfig
from hydra_engine.core.request import Request
from tests.examples import examples
from tests.scheduler.handover.cluster import SIZE, Cluster
from tests.scheduler.sim import Img, config, make_request

TOPOLOGIES = ["EP+D", "ED+P", "E+PD", "E+P+D", "2E+P+2D", "ED+PD", "2EP+D", "2P+PD+E"]
SEEDS = st.integers(0, 1 << 40)
SHARED = [Img(5, name="a"), Img(8, name="b"), Img(12, name="c")]


def requests(random: Random) -> list[Request]:
    found = []
    for number in range(random.randint(1, 12)):
        parts: list[int | Img] = []
        for _ in range(random.randint(0, 4)):
            own = Img(random.randint(1, 12), random.randint(1, 20), whole=random.random() < 0.5)
            parts.append(random.choice([random.randint(1, 9), random.randint(1, 9), own, *random.choices(SHARED, k=2)]))
        source, eos = random.choice([None, 0, 0]), range(random.choice([0, 60]))
        found.append(make_request(number, *parts, 1, max_new=random.randint(1, 10), source=source, eos=eos))
    return found


def smallest(work: list[Request], spare: int = 0) -> dict[str, int]:
    """Pools of one largest request and one largest image, and `spare` blocks more."""
    images = [image.num_tokens for request in work for image in request.images]
    kv = max(-(-(request.num_prompt + request.max_new_tokens) // SIZE) for request in work)
    return {"kv_blocks": kv + spare, "image_blocks": max((-(-n // SIZE) for n in images), default=1) + spare}


def settings_of(random: Random) -> SchedulerConfig:
    look_ahead = random.random() < 0.4
    policies = {
        "scheduling_policy": random.choice(["priority", "priority", "fcfs", "sjf"]),
        "encode_policy": random.choice(["priority", "priority", "fcfs", "srpt"]),
    }
    limits = {"max_num_seqs": random.randint(1, 4), "handover_tokens": random.choice([0, 0, 3])}
    return config(token_budget=12, look_ahead=look_ahead, max_bypass=2, **limits, **policies)


def switches_of(random: Random) -> ClusterConfig:
    """Draws the switches; most of the time all are on."""
    early_kv, prefetch = random.random() < 0.7, random.random() < 0.7
    return ClusterConfig(early_kv=early_kv, prefetch_features=prefetch)


@pytest.mark.quick("2EP+D")
@pytest.mark.parametrize("topology", TOPOLOGIES)
@settings(max_examples=examples(10), deadline=None)
@given(seed=SEEDS)
def test_every_request_ends_with_its_tokens(topology: str, seed: int) -> None:
    random = Random(seed)
    work = requests(random)
    own = {"config": settings_of(random), "switches": switches_of(random), "state_blocks": random.choice([0, 1, 3])}
    Cluster(topology, seed, **own, **smallest(work)).run(work)


@pytest.mark.quick("ED+PD")
@pytest.mark.parametrize("topology", TOPOLOGIES)
@settings(max_examples=examples(8), deadline=None)
@example(seed=393)  # an attempt that is withdrawn between its last token and its end
@given(seed=SEEDS)
def test_also_with_aborts_invalid_copies_withdrawals_and_loans(topology: str, seed: int) -> None:
    random = Random(seed)
    work = requests(random)
    pools = smallest(work, spare=random.randint(0, 4))
    faults = {"bad_copies": 0.1, "withdrawals": 0.01, "lends": 0.03}
    own = {"config": settings_of(random), "switches": switches_of(random), "state_blocks": random.choice([0, 1, 3])}
    Cluster(topology, seed, **own, **pools, **faults).run(work, aborts=0.003)

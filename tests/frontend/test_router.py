"""Routes: who serves which stage, which of several, and why nobody can."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.core.instances import Condition, Role, Topology
from hydra_engine.core.reports import Status
from hydra_engine.core.request import Request
from hydra_engine.frontend.routing.estimate import Estimate, Estimates
from hydra_engine.frontend.routing.instances import InstanceLoad, missing_for_good, missing_now
from hydra_engine.frontend.routing.pace import Line, Pace
from hydra_engine.frontend.routing.router import REMEMBERED, Route, Router
from tests.examples import examples
from tests.frontend.rig import make_request

TEXT = make_request(1)
PICTURE = make_request(2, images=[16])


def table(topology: str) -> dict[str, InstanceLoad]:
    """A table of instances that are all ready and connected."""
    parsed = Topology.parse(topology)
    instances = {
        name: InstanceLoad(name, spec.role, Condition.READY)
        for name, spec in zip(parsed.names, parsed.instances, strict=True)
    }
    for instance in instances.values():
        instance.pairs = set(instances) - {instance.name}
    return instances


def status(**changes: Any) -> Status:
    fields = dict.fromkeys(Status.__struct_fields__[:11], 0) | {"kv_blocks_total": 100} | changes
    return Status(**fields)


def routed(instances: dict[str, InstanceLoad], request: Request, policy: str = "least-loaded") -> Route:
    route = Router(instances, policy).route(request)
    assert isinstance(route, Route)
    return route


@pytest.mark.parametrize(
    ("topology", "request_", "expected"),
    [
        ("EPD", PICTURE, Route("epd0", "epd0", "EPD")),
        ("EPD", TEXT, Route("epd0", "epd0", "EPD")),
        ("E+P+D", TEXT, Route("p0", "", "P")),
        ("E+P+D", PICTURE, Route("p0", "", "P", remote_images=True)),
        ("EP+D", PICTURE, Route("ep0", "", "EP")),
        ("ED+P", PICTURE, Route("p0", "", "P", remote_images=True)),
        ("ED+P", TEXT, Route("p0", "", "P")),
        ("E+PD", PICTURE, Route("pd0", "pd0", "PD", remote_images=True)),
        ("ED+PD", PICTURE, Route("pd0", "pd0", "PD", remote_images=True)),
    ],
)
def test_routes_of_each_kind_of_topology(topology: str, request_: Request, expected: Route) -> None:
    assert routed(table(topology), request_) == expected


def test_what_prefills_and_decodes_hands_over_only_to_one_that_does_not_prefill() -> None:
    instances = table("PD+D+E")
    assert routed(instances, TEXT).decode == "pd0"
    instances["pd0"].decodes, instances["pd0"].decode_tokens = 10, 1000
    assert routed(instances, TEXT) == Route("pd0", "", "P")
    assert Router(instances).decoder("pd0", 8) == "d0"
    instances["d0"].role = Role.P | Role.D
    instances["d0"].prefill_tokens = 10**6
    assert routed(instances, TEXT) == Route("pd0", "pd0", "PD"), "neither waits for room at the other"


def test_where_it_decodes_is_decided_by_the_loads_of_the_moment_it_is_asked_for() -> None:
    instances = table("P+2D+E")
    router = Router(instances)
    assert isinstance(route := router.route(TEXT), Route) and (route.decode, route.moves) == ("", True)
    instances["d0"].status = status(kv_blocks_used=99)
    instances["d1"].decodes, instances["d1"].decode_tokens = 9, 5000
    assert router.decoder("p0", 8) == "d1"
    instances["d1"].condition = Condition.DRAINING
    assert router.decoder("p0", 8) == "d0"
    instances["d0"].condition = Condition.STARTING
    assert router.decoder("p0", 8) == "d1", "what is under way ends where it can"
    instances["p0"].pairs.discard("d1")
    assert router.decoder("p0", 8) == Role.D


def test_the_least_loaded_one_is_taken_and_equals_take_turns() -> None:
    instances = table("3EPD")
    router = Router(instances)
    first = [router.route(TEXT) for _ in range(6)]
    assert [route.prefill for route in first if isinstance(route, Route)] == ["epd0", "epd1", "epd2"] * 2
    instances["epd0"].prefill_tokens, instances["epd1"].decodes = 100, 3
    assert {routed(instances, TEXT).prefill for _ in range(3)} == {"epd2"}


def test_an_instance_whose_kv_is_nearly_full_comes_last() -> None:
    instances = table("EPD+EPD")
    instances["epd0"].status = status(kv_blocks_used=97)
    instances["epd1"].decode_tokens = 5000
    assert routed(instances, TEXT).prefill == "epd1"
    instances["epd1"].status = status(kv_blocks_used=99)
    assert routed(instances, TEXT).prefill == "epd0"


def test_round_robin_ignores_loads() -> None:
    instances = table("EPD+EPD")
    instances["epd0"].prefill_tokens = 10**6
    router = Router(instances, "round-robin")
    routes = [router.route(TEXT) for _ in range(4)]
    assert [route.prefill for route in routes if isinstance(route, Route)] == ["epd0", "epd1"] * 2


@pytest.mark.parametrize(
    ("topology", "unusable", "stage"),
    [("E+P+D", "p0", "P"), ("E+P+D", "d0", "D"), ("E+P+D", "e0", "E"), ("EP+D", "d0", "D"), ("EPD", "epd0", "P")],
)
@pytest.mark.parametrize("condition", [Condition.SILENT, Condition.STARTING, Condition.DRAINING, Condition.FAILED])
def test_it_says_which_stage_lacks_an_instance(topology: str, unusable: str, stage: str, condition: Condition) -> None:
    instances = table(topology)
    instances[unusable].condition = condition
    assert Router(instances).route(PICTURE) == Role[stage]
    assert missing_now(instances.values(), images=True) == Role[stage]
    for_good = missing_for_good(instances.values(), images=True)
    assert for_good == (Role[stage] if condition is Condition.FAILED else None)


def test_text_needs_no_encoder() -> None:
    instances = table("E+P+D")
    instances["e0"].condition = Condition.FAILED
    assert isinstance(Router(instances).route(TEXT), Route)


def test_a_pair_that_is_down_is_no_way() -> None:
    instances = table("P+P+D+E")
    instances["p0"].pairs.discard("d0")
    instances["d0"].pairs.discard("p0")
    assert {routed(instances, TEXT).prefill for _ in range(3)} == {"p1"}
    instances["d0"].pairs.clear()
    instances["p1"].pairs.discard("d0")
    assert Router(instances).route(TEXT) == Role.D
    assert missing_for_good(instances.values(), images=False) is None  # pairs come up again


# ---- images


def test_images_of_one_request_are_spread_over_all_encoders_largest_first() -> None:
    instances = table("3E+P+D")
    images = make_request(5, images=[10, 40, 10, 20, 10]).images
    chosen = Router(instances).encoders("p0", list(enumerate(images)))
    assert isinstance(chosen, dict)
    loads = {name: sum(images[i].num_patches for i in indices) for name, indices in chosen.items()}
    assert sorted(loads.values()) == [20, 30, 40]


def test_what_waits_at_an_encoder_counts() -> None:
    instances = table("2E+P+D")
    instances["e0"].patches = 100
    images = make_request(5, images=[10, 10, 10]).images
    assert Router(instances).encoders("p0", list(enumerate(images))) == {"e1": [0, 1, 2]}


def test_images_leave_an_instance_that_encodes_only_where_they_would_be_done_sooner() -> None:
    instances = table("EP+E+D")
    router = Router(instances)

    def remote(local: int, other: int) -> bool:
        instances["ep0"].patches, instances["e0"].patches = local, other
        route = router.route(PICTURE)
        assert isinstance(route, Route)
        assert route.stages == ("P" if route.remote_images else "EP")
        return route.remote_images

    assert not remote(0, 0)
    assert remote(1, 0)
    assert not remote(40, 40)
    assert remote(80, 40)
    instances["ep0"].pace = Pace(feature_s=1.0)
    assert not remote(80, 40), "the copy takes longer"


def test_another_instance_that_prefills_gets_no_images_of_one_that_encodes() -> None:
    instances = table("EPD+EPD")
    instances["epd0"].patches = 10_000
    instances["epd1"].prefill_tokens = 10**6
    assert routed(instances, PICTURE) == Route("epd0", "epd0", "EPD")


def test_an_encoder_that_is_being_emptied_still_helps_who_is_under_way() -> None:
    instances = table("E+P+D")
    instances["e0"].condition = Condition.DRAINING
    images = list(enumerate(PICTURE.images))
    assert Router(instances).encoders("p0", images) == {"e0": [0]}
    instances["e0"].condition = Condition.SILENT
    assert Router(instances).encoders("p0", images) == Role.E


# ---- affinity


def test_a_prompt_goes_where_its_beginning_was_unless_that_is_much_busier() -> None:
    instances = table("EPD+EPD")
    router = Router(instances, "affinity")
    first = router.route(make_request(1, prompt=120))
    assert isinstance(first, Route)
    other = next(name for name in instances if name != first.prefill)
    instances[first.prefill].prefill_tokens = 30  # fewer than it has cached
    longer = make_request(3, prompt=200)  # begins with the same tokens
    again = router.route(longer)
    assert isinstance(again, Route) and again.prefill == first.prefill
    instances[first.prefill].prefill_tokens = 250
    assert router.route(longer) == Route(other, other, "EPD")


def test_a_picture_goes_where_it_was_encoded() -> None:
    instances = table("3E+P+D")
    router = Router(instances, "affinity")
    images = list(enumerate(make_request(5, images=[10, 10, 10]).images))
    first = router.encoders("p0", images)
    assert isinstance(first, dict) and len(first) == 3
    for name, indices in first.items():
        assert router.encoders("p0", [images[indices[0]]]) == {name: indices}


def test_what_affinity_remembers_is_bounded() -> None:
    instances = table("2E+P+P+D")
    router = Router(instances, "affinity")
    for number in range(600):
        request = make_request(number, images=[4] * 8, prompt=40)
        assert isinstance(router.route(request), Route)
        digests = [(i, image) for i, image in enumerate(request.images)]
        router.encoders("p0", digests)
    assert all(len(memory) <= REMEMBERED for memory in (router._prompts, router._prefilled, router._encoded))


# ---- whatever the table


roles = st.sampled_from(["E", "P", "D", "EP", "ED", "PD", "EPD"])


@st.composite
def tables(draw: st.DrawFn) -> dict[str, InstanceLoad]:
    instances: dict[str, InstanceLoad] = {}
    for index, letters in enumerate(draw(st.lists(roles, min_size=1, max_size=6))):
        name = f"i{index}"
        condition = draw(st.sampled_from([Condition.READY] * 4 + list(Condition)))
        instance = InstanceLoad(name, Role.parse(letters), condition)
        instance.prefill_tokens, instance.decode_tokens = draw(st.integers(0, 9999)), draw(st.integers(0, 9999))
        instance.patches = draw(st.integers(0, 99))
        if draw(st.booleans()):
            instance.status = status(kv_blocks_used=draw(st.integers(0, 100)))
        instances[name] = instance
    for name in instances:
        for other in instances:
            if name < other and draw(st.integers(0, 4)):
                instances[name].pairs.add(other)
                instances[other].pairs.add(name)
    return instances


@settings(max_examples=examples(200), deadline=None)
@given(tables(), st.lists(st.integers(1, 50), max_size=4), st.sampled_from(["least-loaded", "affinity", "round-robin"]))
def test_only_what_can_be_used_is_chosen(instances: dict[str, InstanceLoad], images: list[int], policy: str) -> None:
    router = Router(instances, policy)
    for number in range(3):
        request = make_request(number, images=images, prompt=40)
        route = router.route(request)
        missing = missing_now(instances.values(), images=bool(images))
        if isinstance(route, Role):
            assert route == missing
            continue
        assert missing is None
        decoder = route.decode or router.decoder(route.prefill, 8)
        assert not isinstance(decoder, Role)
        prefill, decode = instances[route.prefill], instances[decoder]
        assert prefill.usable and Role.P in prefill.role
        assert decode.usable and Role.D in decode.role
        assert decode is prefill or decode.name in prefill.pairs
        assert (decode is prefill) == (not route.moves)
        assert decode is prefill or Role.D not in prefill.role or Role.P not in decode.role
        assert set(route.stages) <= set(prefill.role.letters)
        assert ("D" in route.stages) == (decode is prefill)
        if images and not route.remote_images:
            assert "E" in route.stages
        if route.remote_images:
            assert "E" not in route.stages
            chosen = router.encoders(route.prefill, list(enumerate(request.images)))
            assert isinstance(chosen, dict)
            assert sorted(index for indices in chosen.values() for index in indices) == list(range(len(images)))
            for name in chosen:
                assert instances[name].usable and Role.E in instances[name].role and name in prefill.pairs


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(1, 4))
def test_no_encoder_gets_more_than_its_share_and_one_image(patches: list[int], encoders: int) -> None:
    instances = table(f"{encoders}E+P+D")
    images = make_request(1, images=patches).images
    chosen = Router(instances).encoders("p0", list(enumerate(images)))
    assert isinstance(chosen, dict)
    most = max(sum(patches[i] for i in indices) for indices in chosen.values())
    assert most <= sum(patches) / encoders + max(patches)


class Fresh(Estimates):
    """Keeps no estimate."""

    def current(self, load: InstanceLoad) -> Estimate:
        return Estimate(load, self._ahead)


COUNTS = (
    *("prefill_tokens", "patches", "decodes", "decode_tokens", "later_decodes"),
    *("expected_decodes", "expected_tokens", "arriving_tokens"),
)
changes = st.one_of(
    st.tuples(st.sampled_from(COUNTS), st.integers(1, 4000)),
    st.tuples(st.sampled_from(("max_num_seqs", "kv_tokens")), st.integers(0, 4000)),
    st.tuples(st.just("status"), st.builds(status, num_running=st.integers(0, 99), kv_blocks_used=st.integers(0, 99))),
    st.tuples(
        st.just("pace"),
        st.builds(
            Pace, decode=st.builds(Line, st.just(0.01), st.floats(0.0, 0.01)), kv_token_s=st.sampled_from((0.0, 1e-5))
        ),
    ),
)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(("3EPD", "2EP+2PD", "2ED+2PD", "E+P+2D")),
    st.lists(st.tuples(st.integers(0, 3), changes), min_size=1, max_size=12),
)
def test_an_estimate_that_is_kept_chooses_as_a_new_one(topology: str, steps: list[tuple[int, tuple[str, Any]]]) -> None:
    instances = table(topology)
    kept, fresh = Router(instances), Router(instances)
    fresh._estimates, fresh._later_estimates = Fresh(ahead=False), Fresh(ahead=True)
    for number, (place, (field, value)) in enumerate(steps):
        setattr([*instances.values()][place % len(instances)], field, value)
        request = make_request(number, images=[16] if number % 2 else [])
        route = kept.route(request)
        assert isinstance(route, Route) and route == fresh.route(request)
        for source in {route.prefill, *([] if topology == "3EPD" else instances)}:
            assert kept.decoder(source, 8) == fresh.decoder(source, 8)
            if request.images:
                pictures = list(enumerate(request.images))
                assert kept.encoders(source, pictures) == fresh.encoders(source, pictures)

"""Topologies: what can be read, what serves a model, and that every refusal names a topology that is taken."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.config import ClusterConfig, EngineConfig
from hydra_engine.core.instances import (
    EPD,
    MAX_INSTANCES,
    InstanceSpec,
    Role,
    Topology,
    check_devices,
    check_serves,
    lends_decodes,
)
from hydra_engine.errors import ConfigError
from tests.examples import examples

ROLES = [Role.parse(letters) for letters in ("E", "P", "D", "EP", "ED", "PD", "EPD")]
DEVICES = ("auto", "cpu", "cuda:0", "cuda:11")
BOTH = Role.P | Role.D

NODES = ("", "n0", "10.0.0.2")

specs = st.builds(InstanceSpec, st.sampled_from(ROLES), st.sampled_from(DEVICES))
placed = st.builds(InstanceSpec, st.sampled_from(ROLES), st.sampled_from(DEVICES), st.sampled_from(NODES))
topologies = st.lists(specs, min_size=1, max_size=8).map(lambda found: Topology(tuple(found)))


def refusal(call: object, *arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)  # type: ignore[operator]
    assert caught.value.param == "topology" and "\n" not in caught.value.message and len(caught.value.message) < 500
    return caught.value.message


def suggested(message: str) -> list[Topology]:
    """The text that the message suggests."""
    found = re.search(r"write (?:for example )?([^ ]+(?: or [^ ]+)*)$", message)
    assert found, message
    return [Topology.parse(text) for text in found[1].split(" or ")]


@pytest.mark.parametrize(
    ("text", "roles", "again"),
    [
        ("EPD", "EPD", "EPD"),
        ("EP+D", "EP D", "EP+D"),
        (" E , P+ D ", "E P D", "E+P+D"),
        ("1E3P4D", "E P P P D D D D", "E+3P+4D"),
        ("2E+P+D", "E E P D", "2E+P+D"),
        ("PD+PD", "PD PD", "2PD"),
        ("PD+P+PD", "PD P PD", "PD+P+PD"),
        ("E@cuda:0,P@cuda:0,2D@cuda:1", "E P D D", "E@cuda:0+P@cuda:0+2D@cuda:1"),
        ("DPE@auto", "EPD", "EPD"),
        ("64EPD", " ".join(["EPD"] * 64), "64EPD"),
    ],
)
def test_texts_and_what_they_mean(text: str, roles: str, again: str) -> None:
    topology = Topology.parse(text)
    assert " ".join(spec.role.letters for spec in topology.instances) == roles
    assert str(topology) == again and Topology.parse(again) == topology


@pytest.mark.parametrize(
    ("text", "places", "devices", "again"),
    [
        ("2E@a+3P@b+4D@b", "a a b b b b b b b", "auto", "2E@a+3P@b+4D@b"),
        ("E@n1+PD@n0:cuda:0", "n1 n0:cuda:0", "auto cuda:0", "E@n1+PD@n0:cuda:0"),
        ("E@n0+P@n0:cuda:1,D@n1:cpu", "n0 n0:cuda:1 n1:cpu", "cuda:1 cuda:1 cpu", "E@n0+P@n0:cuda:1+D@n1:cpu"),
        ("E@nodE2D+1P2D@10.0.0.2:auto", "nodE2D  10.0.0.2 10.0.0.2", "auto", "E@nodE2D+P+2D@10.0.0.2"),
        ("E@cuda-box+PD@auto", "cuda-box ", "auto", "E@cuda-box+PD"),
    ],
)
def test_parts_name_a_node_a_device_or_both(text: str, places: str, devices: str, again: str) -> None:
    topology = Topology.parse(text, nodes=True)
    assert [spec.place for spec in topology.instances] == places.split(" ")
    assert str(topology) == again and Topology.parse(again, nodes=True) == topology
    expected = devices.split() if " " in devices else [devices] * len(topology.instances)
    assert list(topology.devices("auto")) == expected
    check_devices(Topology.parse("E@a:cuda:7+PD", nodes=True), ["cpu"])


@pytest.mark.parametrize("text", ["E@a:+PD", "E@a:gpu+PD", "E@a:b:cpu+PD", "E@-a+PD", "E@a b+PD", "E@cuda:x+PD"])
def test_nodes_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="there is no device"):
        Topology.parse(text, nodes=True)


def test_nodes_need_a_cluster() -> None:
    assert "names of other machines need --cluster" in refusal(lambda: EngineConfig(topology="E@a+PD@b"))
    with pytest.raises(ConfigError, match="heap"):
        ClusterConfig(launcher="heap")
    assert EngineConfig(topology="E@a+PD@b", cluster=ClusterConfig(launcher="ray")).parsed_topology.names


def test_names_count_within_a_role() -> None:
    assert Topology.parse("2E+P+E+DP").names == ("e0", "e1", "p0", "e2", "pd0")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot read the part ''"),
        ("E+", "cannot read the part ''"),
        ("E+X", "cannot read the part 'X'"),
        ("e+p+d", "cannot read the part 'e'; write for example EPD"),
        ("E+PDX", "cannot read the part 'PDX'"),
        ("EE+PD", "'EE' is not a combination"),
        ("1000000EPD", "cannot read the part '1000000EPD'"),
        ("٢EPD", "cannot read the part"),
        ("65EPD", "at most 64 instances"),
        ("40E25PD", "at most 64 instances"),
        ("0E+PD", "the part '0E' stands for no instance"),
        (
            "E@gpu0+PD",
            "there is no device 'gpu0', and names of other machines need --cluster; write cpu or cuda:N, for example",
        ),
        ("E@+PD", "there is no device ''"),
        ("E@cuda+PD", "there is no device 'cuda'"),
        ("E@cuda:01+PD", "there is no device 'cuda:01'"),
        ("E@CPU+PD", "there is no device 'CPU'"),
        ("E@cuda:0P@cuda:1", "there is no device"),
        ("E" * 3000, "cannot read the part"),
        ("E", "no instance for stages P and D; write for example E+PD or EPD"),
        ("P", "no instance for stage D; write for example ED+P or EPD"),
        ("E+P", "no instance for stage D; write for example E+P+D or E+PD"),
        ("E+2D", "no instance for stage P; write for example E+P+2D or E+PD+D"),
        ("D@cpu", "no instance for stage P; write for example EP@cpu+D@cpu or EPD@cpu"),
    ],
)
def test_what_cannot_be_read_or_serves_no_model_is_refused_at_once(text: str, words: str) -> None:
    for make in (Topology.parse, lambda text: EngineConfig(topology=text)):
        assert words in refusal(make, text)


@settings(max_examples=examples(300), deadline=None)
@given(topologies)
def test_what_is_written_is_read_again(topology: Topology) -> None:
    if topology.served & BOTH != BOTH:
        for better in suggested(refusal(Topology.parse, str(topology))):
            check_serves(better, has_vision=True)
    else:
        assert Topology.parse(str(topology)) == topology


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(placed, min_size=1, max_size=8).map(lambda found: Topology((*found, InstanceSpec(EPD, "cpu")))))
def test_what_is_written_with_nodes_is_read_again(topology: Topology) -> None:
    assert Topology.parse(str(topology), nodes=True) == topology


@settings(max_examples=examples(300), deadline=None)
@given(topologies, st.booleans())
def test_a_topology_serves_a_model_or_one_that_does_is_named(topology: Topology, has_vision: bool) -> None:
    needed = EPD if has_vision else BOTH
    idle = not has_vision and any(spec.role == Role.E for spec in topology.instances)
    if topology.served & needed == needed and not idle:
        check_serves(topology, has_vision)
        return
    for better in suggested(refusal(check_serves, topology, has_vision)):
        check_serves(better, has_vision=has_vision or topology.served & BOTH != BOTH)
        # One step away: an instance more, one that does more, or those left out that had nothing to do.
        assert abs(len(better.instances) - len(topology.instances)) <= max(1, len(topology.instances) - 1)


def test_sentences_for_models() -> None:
    assert refusal(check_serves, Topology.parse("P+D"), True) == (
        "topology 'P+D' has no instance for stage E; write for example E+P+D or EP+D"
    )
    assert refusal(check_serves, Topology.parse("E+PD"), False) == (
        "topology 'E+PD': this model has no vision tower, so e0 would have nothing to do; write PD"
    )
    for text in ("PD", "P+D", "EPD", "EP+D"):
        check_serves(Topology.parse(text), has_vision=False)


@pytest.mark.parametrize(
    ("text", "devices", "words"),
    [
        ("E@cuda:9+PD", "cpu", "has no cuda:9, only cpu; write for example E@cpu+PD"),
        ("E@cuda:0+PD@cuda:1", "cpu", "has no cuda:0 and no cuda:1, only cpu; write for example E@cpu+PD@cpu"),
        ("E@cuda:9+PD", "cpu cuda:0 cuda:1", "only cpu, cuda:0 and cuda:1; write for example E@cuda:1+PD"),
        ("E@cuda:9+PD@cpu", "cpu cuda:0", "write for example E@cuda:0+PD@cpu"),
    ],
)
def test_devices_that_there_are_not(text: str, devices: str, words: str) -> None:
    message = refusal(check_devices, Topology.parse(text), devices.split())
    assert words in message
    for better in suggested(message):
        check_devices(better, devices.split())


def test_devices_that_there_are() -> None:
    for text, devices in (("EPD", "cpu"), ("E@cpu+PD", "cpu"), ("E@cuda:0,P@cuda:1,D@cpu", "cpu cuda:0 cuda:1")):
        check_devices(Topology.parse(text), devices.split())


def test_long_topologies_make_short_messages() -> None:
    alternating = "+".join(["E@cuda:0", "P@cuda:1"] * (MAX_INSTANCES // 2))
    assert suggested(refusal(Topology.parse, alternating)) == [Topology.parse("EPD")]


def test_decodes_are_never_lent_in_a_circle() -> None:
    for source in ROLES:
        for target in ROLES:
            if lends_decodes(source, target):
                assert Role.D in source and Role.D in target
                assert not any(lends_decodes(target, other) for other in ROLES), "who borrows does not lend"


@pytest.mark.parametrize(
    ("text", "default", "devices"),
    [
        ("E+PD", "auto", "auto auto"),
        ("E+PD", "cuda:2", "cuda:2 cuda:2"),
        ("E@cuda:1+PD", "auto", "cuda:1 cuda:1"),
        ("E+P@cuda:1+D@cuda:0", "auto", "cuda:1 cuda:1 cuda:0"),
        ("E@cuda:1+PD", "cuda:0", "cuda:1 cuda:0"),
        ("E@cpu+PD", "auto", "cpu cpu"),
    ],
)
def test_instances_that_name_no_device_go_along_with_the_others(text: str, default: str, devices: str) -> None:
    topology = Topology.parse(text)
    placed = topology.devices(default)
    assert placed == tuple(devices.split())
    moved = topology.with_devices(placed)
    assert tuple(spec.device for spec in moved.instances) == placed and moved.names == topology.names

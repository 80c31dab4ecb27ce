"""Instances die, hang or throw at named points of a step or a migration: each request still gets its own tokens.

One engine for each topology is served the same load again and again, with one fault armed at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.mixed import Outcome
from tests import faults
from tests.campaigns.restless import RestlessEngine
from tests.engine.faulty import OPTIONS, Rig, few_requests, right_answers, until
from tests.faults.points import KILLED_EXIT_CODE

REQUESTS = few_requests()
SOURCE = ("src.after_offer", "src.before_free")
TARGET = ("dst.after_reserve", "dst.mid_copy", "dst.after_copy", "dst.before_ack", "dst.after_ack")
STEP = ("eng.before_step", "eng.mid_step")
# (instance, point) of each topology. D of E+P+D does nothing that D of EP+D does not do, and P pulls like D.
EP_D = [("ep0", point) for point in (*SOURCE, *STEP, "vis.before_step")] + [("d0", p) for p in (*TARGET, *STEP)]
IMAGES = ("dst.after_reserve", "dst.mid_copy", "dst.before_ack")
E_P_D = [("e0", point) for point in (*SOURCE, "vis.before_step")] + [("p0", point) for point in (*SOURCE, *IMAGES)]


@pytest.fixture(scope="module")
def golden(tiny_model: Path) -> list[Outcome]:
    return right_answers(tiny_model, REQUESTS)


def make_rig(model: Path, topology: str, golden: list[Outcome], **options: Any) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        faults.enable(patch)
        with RestlessEngine(model, topology=topology, **(OPTIONS | options)) as engine:
            yield Rig(engine, REQUESTS, golden)


@pytest.fixture(scope="module")
def ep_d(tiny_model: Path, golden: list[Outcome]) -> Iterator[Rig]:
    yield from make_rig(tiny_model, "EP+D", golden)


@pytest.fixture(scope="module")
def e_p_d(tiny_model: Path, golden: list[Outcome]) -> Iterator[Rig]:
    """A rig of three instances that compares what a transfer brings with what was offered."""
    yield from make_rig(tiny_model, "E+P+D", golden, check_transfers=True)


@pytest.fixture(scope="module")
def staged(tiny_model: Path, golden: list[Outcome]) -> Iterator[Rig]:
    """Makes all transfers go through host memory."""
    yield from make_rig(tiny_model, "E+P+D", golden, check_transfers=True, transport="host")


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    found: Rig = request.getfixturevalue(request.param)
    yield found
    found.settle()


def strike(rig: Rig, name: str, point: str, action: str, argument: str) -> bool:
    """Serves the load with this fault armed. Whether the instance died of it."""
    before = rig.state(name)
    rig.arm(name, point, action, argument)
    assert rig.serve() == []
    rig.settle()
    return rig.died(name, before)


# Each costs a start of an instance; without the slow ones a point of each side and of a step is left.
STAGED = [("e0", "src.after_staging"), ("p0", "src.after_staging"), ("p0", "dst.mid_copy"), ("d0", "dst.after_copy")]
ALWAYS = {("e0", "src.after_offer"), ("p0", "src.before_free"), ("p0", "dst.mid_copy")}


def cases(topology: str, found: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(topology, *c, marks=() if c in ALWAYS else pytest.mark.slow) for c in found]


KILLS = cases("ep_d", EP_D) + cases("e_p_d", E_P_D)
KILLS += [pytest.param("staged", *case, marks=pytest.mark.slow) for case in STAGED]


@pytest.mark.quick("mid_copy")
@pytest.mark.parametrize(("rig", "name", "point"), KILLS, indirect=["rig"])
def test_an_instance_that_dies_there_costs_nobody_a_token(
    rig: Rig, name: str, point: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert strike(rig, name, point, "kill", "times=1"), "the fault was not met"
    assert f"instance {name} ended with exit code {KILLED_EXIT_CODE}" in caplog.text


IN_THE_LOOP = [("ep_d", "ep0", "src.after_offer"), ("e_p_d", "e0", "src.before_free")]
IN_THE_LOOP += [("ep_d", "d0", "dst.after_reserve"), ("e_p_d", "p0", "dst.after_ack")]


@pytest.mark.slow
@pytest.mark.parametrize(("rig", "name", "point"), IN_THE_LOOP, indirect=["rig"])
def test_an_exception_in_the_loop_of_an_instance_ends_it_loudly(
    rig: Rig, name: str, point: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception in the loop is a bug, and the instance's state cannot be trusted any more; so it starts anew."""
    assert strike(rig, name, point, "raise", "times=1"), "the fault was not met"
    assert f"instance {name} ended with exit code 1" in caplog.text


IN_A_LANE = [("ep_d", "d0", "dst.mid_copy"), ("ep_d", "d0", "dst.after_copy"), ("e_p_d", "p0", "dst.mid_copy")]
IN_A_LANE += [("staged", "d0", "dst.mid_copy")]


@pytest.mark.slow
@pytest.mark.parametrize(("rig", "name", "point"), IN_A_LANE, indirect=["rig"])
def test_an_exception_in_a_copy_costs_another_attempt(rig: Rig, name: str, point: str) -> None:
    invalid = num_invalid(rig, name)
    assert not strike(rig, name, point, "raise", "times=3")
    until(lambda: num_invalid(rig, name) >= invalid + 3, "three copies that do not count")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["p0", "d0"])
@pytest.mark.parametrize("point", ["dst.mid_copy", "dst.after_copy"])
@pytest.mark.parametrize("rig", ["e_p_d"], indirect=True)
def test_bytes_that_change_on_their_way_are_noticed(rig: Rig, name: str, point: str) -> None:
    invalid = num_invalid(rig, name)
    assert not strike(rig, name, point, "corrupt", "times=2")
    until(lambda: num_invalid(rig, name) >= invalid + 2, "two copies that do not count")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["e0", "p0"])
@pytest.mark.parametrize("action", ["raise", "corrupt"])
@pytest.mark.parametrize("rig", ["staged"], indirect=True)
def test_what_goes_wrong_while_blocks_are_staged_costs_another_attempt(rig: Rig, name: str, action: str) -> None:
    """The source takes back what it could not copy; what is wrong in host memory its target notices."""

    def given_up() -> int:
        transfers = {name: status.transfer for name, status in rig.engine.statuses().items()}
        target = {"e0": "p0", "p0": "d0"}[name]
        return transfers[name].withdrawn if action == "raise" else transfers[target].invalid

    before = given_up()
    assert not strike(rig, name, "src.after_staging", action, "times=2")
    until(lambda: given_up() >= before + 2, "two offers that come to nothing")


def num_invalid(rig: Rig, name: str) -> int:
    return rig.engine.statuses()[name].transfer.invalid


DELAYS = [("e_p_d", "e0", "src.after_offer"), ("e_p_d", "p0", "src.before_free"), ("e_p_d", "p0", "dst.after_reserve")]
DELAYS += [("ep_d", "d0", "dst.mid_copy"), ("ep_d", "d0", "dst.before_ack"), ("ep_d", "ep0", "vis.before_step")]


@pytest.mark.slow
@pytest.mark.parametrize(("rig", "name", "point"), DELAYS, indirect=["rig"])
def test_a_delay_there_is_a_delay(rig: Rig, name: str, point: str) -> None:
    began = time.monotonic()
    assert not strike(rig, name, point, "delay", "seconds=0.5 times=1")
    assert time.monotonic() - began >= 0.5, "the fault was not met"

"""The siege itself: its patches apply to the package as it is, and what its oracles say of made-up events."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

from bench.common import ROOT
from tests.campaigns.siege import controls, hosts, long, oracles
from tests.campaigns.siege.__main__ import ALL, choose
from tests.campaigns.siege.cases.mixed import Traffic
from tests.campaigns.siege.clients import Answer, Streamed


@pytest.mark.parametrize("name", controls.names())
def test_a_control_applies_and_names_a_case(name: str) -> None:
    controls.apply(name, ROOT, check=True)
    assert choose(controls.case_of(name))


def test_cases_have_names_of_their_own() -> None:
    names = [case.full_name for case in ALL]
    assert len(set(names)) == len(names)


def test_two_jobs_of_another_client_may_begin_before_ones_own() -> None:
    events = [("texts", "push", "bob"), *[("texts", "begin", "alice")] * 2, ("texts", "begin", "bob")]
    assert oracles.turn(events, "bob", ["text"]) == []
    events.insert(1, ("texts", "begin", "alice"))
    assert [finding.oracle for finding in oracles.turn(events, "bob", ["text"])] == ["turn"]


def test_what_begins_elsewhere_or_while_nobody_waits_is_no_matter() -> None:
    before = [("texts", "begin", "alice")] * 5
    events = [
        *before,
        ("texts", "push", "bob"),
        *[("grammars", "begin", "alice")] * 5,
        ("texts", "begin", "bob"),
        *before,
    ]
    assert oracles.turn(events, "bob", ["text"]) == []


def test_a_queue_that_somebody_should_have_gone_through_is_missed() -> None:
    assert oracles.turn([("texts", "begin", "bob")], "bob", ["text", "picture"])[0].value.startswith("no job")


def test_a_job_that_still_waits_counts_too() -> None:
    assert oracles.turn([("texts", "push", "bob"), *[("texts", "begin", "alice")] * 3], "bob", []) != []


def test_a_fault_of_ours_is_no_clients_and_the_other_way_round() -> None:
    assert oracles.ours([Answer(200), Answer(503)]) == []
    assert oracles.ours([Answer(400)]) and oracles.ours([Answer(500)])
    assert oracles.theirs([Answer(400), Answer(413), Answer(503)]) == []
    assert oracles.theirs([Answer(500)]) and oracles.theirs([Answer(-1)])


def test_a_stream_is_right_to_the_byte_to_the_end_and_in_time() -> None:
    right = Streamed(b"abc", 200, ended=True)
    assert oracles.bystander(right, b"abc") == []
    assert oracles.bystander(right, b"abd")
    assert oracles.bystander(Streamed(b"abc", 200), b"abc")
    assert oracles.bystander(Streamed(b"abc", 200, longest_cpu_s=1.0, ended=True), b"abc")


def test_a_turn_of_the_loop_is_short() -> None:
    assert oracles.lag(20.0, oracles.REFERENCE_MS) == []
    assert oracles.lag(400.0, oracles.REFERENCE_MS) and oracles.lag(101.0, oracles.REFERENCE_MS / 2)
    assert oracles.lag(400.0, 5 * oracles.REFERENCE_MS) == [], "a machine that is five times as slow"


def test_pieces_of_the_long_form_add_up(tmp_path: Path) -> None:
    traffic = Traffic(right=3, hostile=4, slowest_s=1.5)
    traffic.errors["503 instance_lost"] = 2
    traffic.findings.append(oracles.Finding("bystander", "another text"))
    for _ in range(2):
        tally = long.load(tmp_path / "state.json")
        tally.topologies["EPD"] += 1
        tally.add(traffic)
        long.save(tmp_path / "state.json", tally)
    told = long.load(tmp_path / "state.json").summary()
    assert (told["compared"], told["requests"], told["wrong"], told["topologies"]) == (6, 18, 2, {"EPD": 2})
    assert told["refused"] == {"503 instance_lost": 4} and not told["clean"]


async def test_hosts_end_an_answer_when_its_client_leaves() -> None:
    host, told = hosts.Host(), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context["message"]))
    server = await asyncio.start_server(host.answer, "127.0.0.1", 0)
    paths = ("/hold", "/drip", "/chunks", "/segments")
    async with asyncio.timeout(20):
        for path in paths:
            _, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
            writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
            while not host.counts[path]:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            writer.transport.abort()
        while len(asyncio.all_tasks()) > 1:
            gc.collect()  # takes a task that nothing could wake any more
            await asyncio.sleep(0.001)
    server.close()
    await server.wait_closed()
    assert told == []

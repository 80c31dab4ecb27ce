"""Three hosts over Ray, of which some die, are cut off or become slow while requests with pictures run.

Every request must end: with exactly the tokens that one instance gives, or with 503 and a reason within `--recovery-s`
of the fault. Afterwards all instances serve again, nothing is held and no process has more descriptors than before; at
the end nothing is left on any host. The faults:

  killed      all processes of a host at once
  cut off     no frame reaches or leaves a host, for longer than `--fence-s`
  cut between two hosts do not reach each other, and both reach the server's
  slow        50 ms of delay each way and 2 % of frames lost
  raylet      Ray's process on a host is killed
  head        Ray's head process is killed

Host a has Ray's head, the server and PD; b the only E; c another PD. Hosts are networks of this machine (`hosts.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.common import card, emit, write_document
from tests.campaigns.hosts import NETWORK, SANDBOX, Host, Switch, configure, find_obstacle
from tests.campaigns.restless import Footprint, footprint, growth
from tests.faults.server import COMMAND
from tests.server.test_served import QUESTIONS, Served, content_of
from tools import ray_environment

TOPOLOGY = "E@b+PD@a+PD@c"
HOSTS = ("a", "b", "c")
PORT = 6379
REFUSED_S = 6.0  # `--recovery-s`, and a second for clients and a frontend that wait for busy cores
FENCE_S = 10.0
BEFORE_S, AFTER_S, HELD_S = 1.5, 2.0, 6.0  # of load around a fault, and of a fault that ends by itself
READY_S = 300.0  # for the topology to be whole again
REST_S = 10.0
STOPPED_S = 0.1  # for what an instance has sent before it was stopped to arrive
NUM_CLIENTS = 6
SLOW = 0.05, 0.02  # seconds of delay, share of lost frames


@dataclass
class Answer:
    question: int
    began_s: float
    ended_s: float
    status: int
    tokens: list[str] = field(default_factory=list)
    reason: str = ""
    was_lost: bool = False  # an instance that worked on it was lost
    instances: set[str] = field(default_factory=set)

    def delay_s(self, fault_s: float) -> float:
        return self.ended_s - max(self.began_s, fault_s)


@dataclass
class Case:
    fault: str
    requests: int = 0
    running: int = 0  # when it came
    continued: int = 0  # answered although an instance that worked on them was lost
    refused: int = 0
    equal: int = 0  # answers with the tokens of one instance
    slowest_answer_s: float = 0.0  # that ran at the fault, or began until the end of it; since the later of the two
    slowest_refusal_s: float = 0.0
    lasted_s: float = 0.0
    back_s: float = 0.0  # from its end until all instances take requests
    reasons: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Load:
    """Clients that ask one question after the other."""

    def __init__(self, url: str, golden: list[list[str]]) -> None:
        self.answers: list[Answer] = []
        self._url = url
        self._golden = golden
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._drive, args=(number,)) for number in range(NUM_CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _drive(self, number: int) -> None:
        for index in count(number):
            if self._over.wait(0.1):
                return
            self.answers.append(ask(self._url, index % len(QUESTIONS)))

    def was_served_by(self, instance: str, since_s: float) -> bool:
        return any(instance in one.instances for one in list(self.answers) if one.began_s > since_s)

    def judge(self, case: Case, fault_s: float, end_s: float) -> None:
        case.requests = len(self.answers)
        case.running = sum(one.began_s < fault_s < one.ended_s for one in self.answers)
        for one in self.answers:
            if one.status == 200 and one.tokens == self._golden[one.question]:
                case.equal += 1
                case.continued += one.was_lost
                if fault_s < one.ended_s and one.began_s < end_s:
                    case.slowest_answer_s = max(case.slowest_answer_s, one.delay_s(fault_s))
            elif one.status == 503 and one.reason:
                case.refused += 1
                case.slowest_refusal_s = max(case.slowest_refusal_s, one.delay_s(fault_s))
            else:
                case.problems.append(f"status {one.status}: {one.reason or one.tokens}")
        case.reasons = dict(Counter(one.reason for one in self.answers if one.status == 503))
        if case.slowest_refusal_s > REFUSED_S:
            case.problems.append(f"a request was refused after {case.slowest_refusal_s:.1f} s")


def ask(url: str, question: int) -> Answer:
    """Asks with a salt of its own, so that the answer is computed."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": content_of(QUESTIONS[question])}],
        **{"temperature": 0, "max_tokens": 160, "ignore_eos": True, "logprobs": True, "return_metrics": True},
        "cache_salt": os.urandom(8).hex(),
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    began_s = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            reason = json.load(error)["error"]["message"]
        return Answer(question, began_s, time.monotonic(), error.code, reason=reason)
    except OSError as error:
        return Answer(question, began_s, time.monotonic(), 0, reason=str(error))
    spans = answer["metrics"]["timeline"]
    return Answer(
        question,
        began_s,
        time.monotonic(),
        200,
        [token["token"] for token in answer["choices"][0]["logprobs"]["content"]],
        was_lost=any(span["stage"] == "lost" for span in spans),
        instances={span["instance"] for span in spans},
    )


class Deployment:
    """Ray on three hosts, and the server on the first."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.switch = Switch()
        self.switch.start()
        self.hosts = {name: Host(self.switch, name, number, folder) for number, name in enumerate(HOSTS, 1)}
        configure(self.switch.plug("client"), f"{NETWORK}.100")
        self._programs = programs
        self._folder = folder
        self._environment = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": os.urandom(16).hex(),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
        }

    def start_ray(self, name: str) -> None:
        host, head = self.hosts[name], self.hosts["a"]
        place = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self._folder}"]
        command = [
            *(*host.within, str(self._programs / "ray"), "start", "--node-name", name, "--disable-usage-stats"),
            *("--node-ip-address", host.address, "--num-cpus", "2", "--object-store-memory", str(80 << 20)),
            *(place if host is head else ["--address", f"{head.address}:{PORT}"]),
        ]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=READY_S)
        if done.returncode:
            raise RuntimeError(f"Ray does not start on host {name}: {done.stdout}{done.stderr}")

    def serve(self) -> Served:
        head = self.hosts["a"]
        command = [*head.within, str(self._programs / "python"), *COMMAND[1:], "--host", head.address]
        options = ["--cluster", "ray", "--ray-address", f"{head.address}:{PORT}", "--topology", TOPOLOGY]
        return Served(*options, command=command, environment=self._environment)


class Campaign:
    def __init__(self, deployment: Deployment, server: Served, golden: list[list[str]]) -> None:
        self._deployment = deployment
        self._server = server
        self._golden = golden
        self.cases: list[Case] = []

    def instances(self) -> dict[str, dict[str, Any]]:
        try:
            found = self._server.get("/health")
        except urllib.error.HTTPError as error:
            with error:
                found = json.load(error)
        return {one["name"]: one for one in found["instances"]}

    def wait_whole(self) -> None:
        deadline_s = time.monotonic() + READY_S
        while not all(one["condition"] == "ready" for one in self.instances().values()):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not whole again: {self.instances()}")
            time.sleep(0.1)

    def decodes_on(self, instance: str) -> bool:
        """Returns whether the server has a request that decodes there."""
        with urllib.request.urlopen(self._server.url + "/ui/events", timeout=30) as stream:
            snapshot = json.loads(next(line for line in stream if line.startswith(b"data:")).removeprefix(b"data:"))
        return any((one["instance"], one["stage"]) == (instance, "decode") for one in snapshot["running"])

    def stop_at_work(self, host: str, instance: str) -> None:
        """Stops the instance's process while a request decodes there, which then cannot end before the fault."""
        (pid,) = self._deployment.hosts[host].processes("hydra_nodes.process\0")
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s:
            if self.decodes_on(instance):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(STOPPED_S)
                if self.decodes_on(instance):
                    return
                os.kill(pid, signal.SIGCONT)
            time.sleep(0.1)
        raise TimeoutError(f"no request decodes on {instance}")

    def run(
        self,
        fault: str,
        strike: Callable[[], None],
        end: Callable[[], None],
        held_s: float,
        lost: str,
        *,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """`lost`: the instance that is lost and has to serve again, "" if none may be lost. `before`: what happens
        under load, ahead of the fault."""
        case = Case(fault)
        restarts = {name: one["restarts"] for name, one in self.instances().items()}
        with Load(self._server.url, self._golden) as load:
            time.sleep(BEFORE_S)
            before()
            fault_s = time.monotonic()
            strike()
            time.sleep(held_s)
            end_s = time.monotonic()
            end()
            self.wait_whole()
            back_s = time.monotonic()
            time.sleep(AFTER_S)
            while lost and not load.was_served_by(lost, back_s) and time.monotonic() < back_s + READY_S:
                time.sleep(0.1)
        case.lasted_s, case.back_s = end_s - fault_s, back_s - end_s
        load.judge(case, fault_s, end_s)
        now = {name: one["restarts"] for name, one in self.instances().items()}
        changed = {name for name in now if now[name] != restarts[name]}
        if changed != {lost} - {""}:
            case.problems.append(f"restarted: {sorted(changed)}")
        if lost and not load.was_served_by(lost, back_s):
            case.problems.append(f"{lost} serves nothing")
        if any(one.status != 200 for one in load.answers if one.began_s > back_s):
            case.problems.append("requests are refused afterwards")
        case.problems += self.held()
        self.cases.append(case)
        print(asdict(case), flush=True)

    def held(self) -> list[str]:
        deadline_s = time.monotonic() + REST_S
        while not (report := self._server.get("/debug/ledger"))["at_rest"]:
            if time.monotonic() > deadline_s:
                return [f"held afterwards: {report}"]
            time.sleep(0.1)
        return []

    def footprints(self) -> dict[str, Footprint]:
        """Footprints of the server and of the instance beside it, which are not killed."""
        (instance,) = self._deployment.hosts["a"].processes("hydra_nodes.process\0")
        found = {"server": footprint(self._server.process.pid), "pd0": footprint(instance)}
        return {name: replace(one, threads=0) for name, one in found.items()}


def faults(campaign: Campaign, deployment: Deployment) -> None:
    hosts, switch = deployment.hosts, deployment.switch

    def restart(name: str) -> Callable[[], None]:
        def run() -> None:
            hosts[name].kill()
            deployment.start_ray(name)

        return run

    at_work = partial(campaign.stop_at_work, "c", "pd1")
    campaign.run("killed, another one serves (c)", hosts["c"].kill, restart("c"), HELD_S, "pd1", before=at_work)
    campaign.run("killed, the only encoder (b)", hosts["b"].kill, restart("b"), HELD_S, "e0")
    campaign.run("cut off, the only encoder (b)", lambda: switch.cut_off("b"), switch.cuts.clear, FENCE_S + 2, "e0")
    campaign.run("cut between b and c", lambda: switch.cut_off("b", "c"), switch.cuts.clear, HELD_S, "")
    campaign.run("slow (b and c)", lambda: switch.slow.update(b=SLOW, c=SLOW), switch.slow.clear, HELD_S, "")
    campaign.run("raylet killed (c)", lambda: hosts["c"].kill("raylet/raylet"), restart("c"), HELD_S, "pd1")
    campaign.run("head killed (a)", lambda: hosts["a"].kill("gcs_server"), lambda: None, HELD_S, "")


def one_instance() -> list[list[str]]:
    """Returns the tokens of each question as one instance on one machine gives them."""
    server = Served()
    try:
        return [ask(server.url, index).tokens for index in range(len(QUESTIONS))]
    finally:
        server.end()


def run(programs: Path) -> dict[str, Any]:
    """Runs all faults, within the sandbox."""
    problems: list[str] = []
    with TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # names of sockets in it must be short
        deployment = Deployment(programs, Path(folder))
        golden = one_instance()
        for name in HOSTS:
            deployment.start_ray(name)
        server = deployment.serve()
        campaign = Campaign(deployment, server, golden)
        try:
            with Load(server.url, golden):
                time.sleep(BEFORE_S)
            before = campaign.footprints()
            faults(campaign, deployment)
            problems += growth(campaign.footprints, before)
        finally:
            server.end()
            print("".join(server.log), file=sys.stderr)
        if server.process.returncode:
            problems.append(f"the server ended with {server.process.returncode}")
        problems += left_over(deployment)
    return {
        "bench": "node_faults",
        "topology": TOPOLOGY,
        "clients": NUM_CLIENTS,
        "cases": [asdict(case) for case in campaign.cases],
        "problems": problems,
        "card": card() | {"command": "python -m bench.node_faults"},
    }


def left_over(deployment: Deployment) -> list[str]:
    """Processes and shared memory of the engine that are still on hosts."""
    deadline_s = time.monotonic() + REST_S
    while True:
        found = []
        for host in deployment.hosts.values():
            found += [f"process {pid} is left on host {host.name}" for pid in host.processes("hydra_")]
            found += [
                f"/dev/shm/{name} is left on host {host.name}" for name in host.shared_memory() if "hydra" in name
            ]
        if not found or time.monotonic() > deadline_s:
            return found
        time.sleep(0.1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the document there too")
    parser.add_argument("--programs", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.programs is None:
        if obstacle := find_obstacle():
            parser.error(f"no hosts can be made here: {obstacle}")
        again = [sys.executable, "-m", "bench.node_faults", "--programs", str(ray_environment.make())]
        again += sys.argv[1:] if argv is None else argv
        os.execvp(SANDBOX[0], [*SANDBOX, *again])
    document = run(options.programs)
    if options.json is not None:
        write_document(options.json, document)
    emit(document)


if __name__ == "__main__":
    main()

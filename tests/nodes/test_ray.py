"""`serve --cluster ray` over two nodes of a Ray cluster on this machine, which tests start in an environment of its
own: the tokens of one node, and what clients see when an instance or a node dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from hydra_engine.config import ClusterConfig, EngineConfig
from hydra_engine.core.instances import InstanceSpec, Role
from hydra_engine.errors import ConfigError, ResourceError
from hydra_nodes import ray_launcher
from hydra_nodes.ray_launcher import RayLauncher
from tests.cluster.conftest import wait_until
from tests.faults.server import COMMAND
from tests.server.test_served import QUESTIONS, ROOT, Served, content_of
from tools import ray_environment

NODES = [
    {"NodeName": "a", "NodeManagerHostname": "host1", "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 2.0}},
    {
        "NodeName": "b",
        "NodeManagerHostname": "host2",
        "NodeManagerAddress": "10.0.0.2",
        "Resources": {"CPU": 8.0, "GPU": 2.0},
    },
    {"NodeName": "c", "NodeManagerHostname": "host2", "NodeManagerAddress": "10.0.0.3", "Resources": {"CPU": 1.0}},
]
SOURCES = f"{ROOT}:{ROOT / 'kernels'}"
CPU_NODES = 4
REFUSED_S = 30.0  # 5 on idle cores


def config_of(topology: str) -> EngineConfig:
    return EngineConfig(topology=topology, cluster=ClusterConfig(launcher="ray"))


def test_without_a_token_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"Ray has no token.*`ray get-auth-token --generate`"):
        ray_launcher.check_token()
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0123")
    ray_launcher.check_token()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match="Ray has no token"):
        ray_launcher.check_token()


def test_without_ray_a_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123")
    for variable in (ray_launcher.HEADLESS, ray_launcher.JOIN_TRIES, ray_launcher.NO_REPORTS):
        monkeypatch.setenv(*variable)
    with pytest.raises(ConfigError, match=r"needs the package ray.*`make ray`"):
        RayLauncher(config_of("E@a+PD@a")).describe()


def test_nodes_have_the_names_that_ray_has_for_them() -> None:
    for name, address in (("a", "10.0.0.1"), ("host1", "10.0.0.1"), ("10.0.0.3", "10.0.0.3")):
        assert ray_launcher.find_node(NODES, name)["NodeManagerAddress"] == address
    pod = NODES[1] | {"Labels": {ray_launcher.LABEL: "pod"}}
    assert ray_launcher.find_node([NODES[0], pod], "pod") is ray_launcher.find_node([NODES[0], pod], "b") is pod
    with pytest.raises(ConfigError, match="2 nodes are called host2; give them names with `ray start --node-name`"):
        ray_launcher.find_node(NODES, "host2")
    with pytest.raises(ResourceError, match="the Ray cluster has no node d, only a, b, c;"):
        ray_launcher.find_node(NODES, "d")
    with pytest.raises(ConfigError, match="instance pd0 has no node; write for example E@node1"):
        ray_launcher.specs_by_name(config_of("E@a+PD"))


def test_instances_of_one_device_share_a_bundle_and_each_device_has_its_own() -> None:
    specs = ray_launcher.specs_by_name(config_of("2E@a+P@b:cuda:0+PD@b:cuda:0+D@b:cuda:1"))
    nodes = {name: ray_launcher.find_node(NODES, name) for name in ("a", "b")}
    assert ray_launcher.bundles_by_device(specs, nodes) == {
        ("a", "auto"): {"CPU": 2, "node:10.0.0.1": 0.001},
        ("b", "cuda:0"): {"CPU": 2, "GPU": 1, "node:10.0.0.2": 0.001},
        ("b", "cuda:1"): {"CPU": 1, "GPU": 1, "node:10.0.0.2": 0.001},
    }
    one_gpu = {"e0": InstanceSpec(Role.E, "auto", "b")}
    assert ray_launcher.bundles_by_device(one_gpu, nodes) == {
        ("b", "auto"): {"CPU": 1, "GPU": 1, "node:10.0.0.2": 0.001}
    }
    labelled = {"pod": NODES[1] | {"Labels": {ray_launcher.LABEL: "pod"}}}
    specs = {"e0": InstanceSpec(Role.E, "auto", "pod")}
    assert ray_launcher.bundles_by_device(specs, labelled) == {("pod", "auto"): {"CPU": 1, "GPU": 1}}, "anywhere"
    for topology, sentence in (
        ("3EPD@a", "node a has 2 CPU for Ray and the topology needs 3 there; start Ray with --num-cpus or"),
        ("E@b:cuda:0+P@b:cuda:1+D@b:cuda:2", "node b has 2 GPU for Ray and the topology needs 3 there"),
        ("EPD@a:cuda:0", "node a has 0 GPU for Ray and the topology needs 1 there"),
    ):
        with pytest.raises(ResourceError, match=sentence):
            ray_launcher.bundles_by_device(ray_launcher.specs_by_name(config_of(topology)), nodes)


class RayNodes:
    """A Ray cluster of this machine, whose nodes have loopback addresses of their own."""

    def __init__(self, programs: Path, host: str = "127.0.0.1") -> None:
        self.programs = programs
        self.folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # names of sockets in it must be short
        token = self.folder / "token"
        token.write_text("0123456789abcdef" * 2)
        self.environment = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": SOURCES,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        with socket.create_server((host, 0)) as free:
            self.address = f"{host}:{free.getsockname()[1]}"
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(
        self,
        name: str,
        host: str,
        *options: str,
        head: bool = False,
        within: Sequence[str] = (),
        **variables: str,
    ) -> None:
        """Starts Ray on a node. `within`: a command that runs others in a network of their own. `variables`: of its
        environment."""
        place = [
            "--head",
            "--port",
            self.address.split(":")[1],
            "--include-dashboard=false",
            f"--temp-dir={self.folder}",
        ]
        command = [
            *within,
            *(str(self.programs / "ray"), "start", "--block", "--node-name", name, "--node-ip-address", host),
            *("--num-cpus", str(CPU_NODES), "--disable-usage-stats", "--object-store-memory", str(80 << 20)),
            *(place if head else ["--address", self.address]),
            *options,
        ]
        self.launch(name, command, **variables)

    def launch(self, name: str, command: Sequence[str], **variables: str) -> None:
        """Starts Ray on a node by a command, and returns once it runs."""
        process = self.processes[name] = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment | variables,
            start_new_session=True,
        )
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "Ray runtime started" in line:
                return
        raise AssertionError("".join(said))

    def kill_raylet(self, name: str) -> None:
        (raylet,) = [pid for pid in descendants(self.processes[name].pid) if is_named(pid, "raylet/raylet")]
        os.kill(raylet, signal.SIGKILL)

    def end(self, name: str) -> None:
        process = self.processes.pop(name)
        left = descendants(process.pid)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in left:
            if is_named(pid, "ray"):
                os.kill(pid, signal.SIGKILL)
        assert process.stdout is not None
        process.stdout.close()


def is_named(pid: int, part: str) -> bool:
    try:
        return part in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    found, todo = [], [pid]
    while todo:
        with suppress(OSError):  # one that ends meanwhile
            for task in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
                children = [int(child) for child in task.read_text().split()]
                todo += children
                found += children
    return found


@pytest.fixture(scope="module")
def programs() -> Path:
    try:
        return ray_environment.make()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"Ray cannot be installed here: {error}")


@contextmanager
def cluster(programs: Path, host: str) -> Iterator[RayNodes]:
    started = RayNodes(programs, host)
    try:
        started.start("a", host, head=True)
        yield started
    finally:
        for name in reversed(list(started.processes)):
            started.end(name)
        rmtree(started.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def nodes(programs: Path) -> Iterator[RayNodes]:
    with cluster(programs, "127.0.0.1") as started:
        started.start("b", "127.0.0.2", "--labels", f"{ray_launcher.LABEL}=encoder")
        yield started


def ask(server: Served, question: dict[str, Any]) -> tuple[int, str, float]:
    """Status, text or reason, and seconds."""
    messages = [{"role": "user", "content": content_of(question)}]
    body = json.dumps({"model": "demo", "messages": messages, "temperature": 0}).encode()
    request = urllib.request.Request(server.url + "/v1/chat/completions", body, {"Content-Type": "application/json"})
    began_s = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)["choices"][0]["message"]["content"]
            return response.status, answer, time.monotonic() - began_s
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["error"]["message"], time.monotonic() - began_s


def instances(server: Served) -> dict[str, dict[str, Any]]:
    try:
        found = server.get("/health")
    except urllib.error.HTTPError as error:
        with error:
            found = json.load(error)
    return {one["name"]: one for one in found["instances"]}


def wait_ready(server: Served) -> None:
    def are_ready() -> bool:
        return all(one["condition"] == "ready" for one in instances(server).values())

    wait_until(are_ready, "all instances are ready")


def process_of(name: str, nodes: RayNodes) -> int:
    started = [pid for process in nodes.processes.values() for pid in descendants(process.pid)]
    (found,) = [pid for pid in started if is_named(pid, f"hydra_nodes.process\0--name\0{name}\0")]
    return found


PICTURES = [question for question in QUESTIONS if question["picture"]]
TEXT = next(question for question in QUESTIONS if not question["picture"])


@pytest.mark.slow
def test_two_nodes_answer_as_one_and_any_of_them_may_die(nodes: RayNodes) -> None:
    command = [str(nodes.programs / "python"), *COMMAND[1:]]
    options = ["--cluster", "ray", "--ray-address", nodes.address, "--topology", "E@encoder+PD@a"]
    server = Served(*options, command=command, environment=nodes.environment)
    try:
        for question in (PICTURES[0], TEXT):
            assert ask(server, question)[:2] == (200, question["answer"]), "as on one node"
        os.kill(process_of("e0", nodes), signal.SIGKILL)
        status, said, seconds = ask(server, PICTURES[1])
        is_refused = status == 503 and seconds < REFUSED_S
        assert is_refused or (status, said) == (200, PICTURES[1]["answer"]), (said, seconds)
        wait_ready(server)
        assert instances(server)["e0"]["restarts"] == 1
        nodes.kill_raylet("b")
        wait_until(lambda: instances(server)["e0"]["condition"] != "ready", "its instance ends with it")
        assert ask(server, TEXT)[:2] == (200, TEXT["answer"])
        status, said, seconds = ask(server, PICTURES[2])
        assert status == 503 and seconds < REFUSED_S, (status, said, seconds)
        assert ask(server, TEXT)[:2] == (200, TEXT["answer"])
        nodes.end("b")
        nodes.start("b", "127.0.0.3", "--labels", f"{ray_launcher.LABEL}=encoder")  # as a pod that is replaced
        wait_ready(server)
        for question in QUESTIONS:
            assert ask(server, question)[:2] == (200, question["answer"])
        assert server.get("/debug/ledger")["at_rest"]
        pids = [process_of(name, nodes) for name in ("e0", "pd0")]
    finally:
        server.end()
    assert server.process.returncode == 0 and not any(is_named(pid, "hydra_nodes") for pid in pids), "nothing stays"


HEADLESS = """
import asyncio, os, signal, sys, time
from hydra_engine.config import ClusterConfig, EngineConfig
from hydra_nodes.ray_launcher import RayCluster

async def main():
    cluster = RayCluster()
    on = ClusterConfig(launcher="ray", ray_address=sys.argv[1])
    await cluster.place(EngineConfig(topology="EPD@a", cluster=on))
    assert sys.excepthook is sys.__excepthook__
    os.kill(int(sys.argv[2]), signal.SIGKILL)
    await asyncio.sleep(1)
    before_s = time.process_time()
    await asyncio.sleep(2)
    print(time.process_time() - before_s)
    await cluster.free()

asyncio.run(main())
print("left")
sys.exit(5)
"""


@pytest.mark.slow
def test_without_its_head_a_process_has_its_time_and_ends_with_its_own_exit_code(programs: Path) -> None:
    with cluster(programs, "127.0.0.1") as started:
        (head,) = [pid for pid in descendants(started.processes["a"].pid) if is_named(pid, "gcs_server")]
        command = [str(programs / "python"), "-c", HEADLESS, started.address, str(head)]
        done = subprocess.run(command, env=started.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 5, done.stderr
    used_s, left = done.stdout.split()
    assert left == "left" and float(used_s) < 0.5, "of two seconds"


SPEAKING = """
import asyncio, sys
import ray
from ray._private.utils import publish_error_to_driver
from hydra_engine.config import ClusterConfig, EngineConfig
from hydra_nodes.ray_launcher import RayCluster

def speak():
    print("said by an actor")

async def main():
    cluster = RayCluster()
    on = ClusterConfig(launcher="ray", ray_address=sys.argv[1])
    await cluster.place(EngineConfig(topology="EPD@a", cluster=on))
    ray.get(ray.remote(speak).options(num_cpus=0).remote())
    publish_error_to_driver("node", "said by the head", ray._private.worker.global_worker.gcs_client)
    print("answer", flush=True)
    sys.stdin.read()
    await cluster.free()

asyncio.run(main())
"""


@pytest.mark.slow
def test_what_ray_prints_is_not_among_answers(nodes: RayNodes, tmp_path: Path) -> None:
    command = [str(nodes.programs / "python"), "-c", SPEAKING, nodes.address]
    answers, log = tmp_path / "answers", tmp_path / "log"
    with answers.open("w") as out, log.open("w") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=errors, env=nodes.environment)
    try:
        wait_until(
            lambda: all(words in log.read_text() for words in ("said by an actor", "said by the head")), "both are said"
        )
    finally:
        process.communicate(timeout=60)
    assert answers.read_text() == "answer\n" and process.returncode == 0

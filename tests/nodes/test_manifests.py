"""The commands of deploy/compose.cluster.yml and deploy/kuberay.yml, run as processes of this machine: its hosts are
loopback addresses, and its files and ports others."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from tests.nodes.test_ray import RayNodes, programs
from tests.packaging.test_deploy import DEPLOY, compose, kuberay, text_of
from tests.server.test_served import QUESTIONS, Served, content_of

__all__ = ["programs"]
pytestmark = pytest.mark.slow
HOSTS = {"a": "127.0.0.1", "b": "127.0.0.2", "c": "127.0.0.3"}


@pytest.fixture
def nodes(programs: Path) -> Iterator[RayNodes]:
    started = RayNodes(programs)
    # As in a container: nobody's home is there.
    started.environment |= {"RAY_TMPDIR": str(started.folder), "HOME": "/nonexistent"}
    started.environment.pop("RAY_AUTH_TOKEN_PATH")
    try:
        yield started
    finally:
        for name in reversed(list(started.processes)):
            started.end(name)
        rmtree(started.folder, ignore_errors=True)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def answer(url: str, question: dict[str, Any]) -> str:
    body = {"model": "demo", "messages": [{"role": "user", "content": content_of(question)}], "temperature": 0}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer 0123456789abcdef"}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def assert_serves(nodes: RayNodes, words: list[str], **variables: str) -> None:
    """`words`: of `hydra-engine serve`. Each instance is on another node."""
    python = str(nodes.programs / "python")
    command = [python, "-m", "hydra_engine", "serve", *words, "--port", "0", "--threads", "1"]
    server = Served(command=command, environment=nodes.environment | variables)
    try:
        with urllib.request.urlopen(server.url + "/health", timeout=30) as response:
            assert {one["node"] for one in json.load(response)["instances"]} == set(HOSTS)
        for question in QUESTIONS[:4]:
            assert answer(server.url, question) == question["answer"]
    finally:
        server.end()
    assert server.process.returncode == 0


def test_the_hosts_of_the_compose_file_answer_as_one(nodes: RayNodes) -> None:
    document = compose("compose.cluster.yml")
    (nodes.folder / "ray_token").write_text("0123456789abcdef" * 2)
    (nodes.folder / "hydra_keys").write_text("me:0123456789abcdef\n")
    gcs = free_port()

    def local(word: str, manager: str = "") -> str:
        for old, new in (
            ("6379", gcs),
            ("6380", manager),
            ("/run/secrets", str(nodes.folder)),
            *((service["networks"]["hosts"]["ipv4_address"], HOSTS[name]) for name, service in hosts.items()),
        ):
            word = word.replace(old, new)
        return re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word)

    hosts = {name: service for name, service in document["services"].items() if name != "server"}
    for name, service in hosts.items():
        manager = free_port()
        ray, *words = [local(word, manager) for word in [*service["entrypoint"], *service["command"]]]
        variables = {key: local(value) for key, value in service["environment"].items()}
        nodes.launch(name, [str(nodes.programs / ray), *words], **variables)
        _, *check = [local(word, manager) for word in service["healthcheck"]["test"]]
        subprocess.run([str(nodes.programs / check[0]), *check[1:]], check=True, timeout=30)
    server = document["services"]["server"]
    (entry,) = re.findall(
        r'^ENTRYPOINT \["hydra-engine", "serve", (.*)\]$', text_of(DEPLOY / "Dockerfile"), re.MULTILINE
    )
    image = [local(word) for word in json.loads(f"[{entry}]")]
    image[image.index("0.0.0.0")] = "127.0.0.1"
    variables = {key: local(value) for key, value in server["environment"].items()}
    assert_serves(nodes, [*image, *map(local, server["command"])], **variables)


def test_the_pods_of_kuberay_answer_as_one(nodes: RayNodes) -> None:
    """KubeRay makes a command of `ray start` from `rayStartParams` and `labels`, and gives pods the token and their
    addresses."""
    _, job = kuberay()
    spec = job["spec"]["rayClusterSpec"]
    (nodes.folder / "hydra_keys").write_text("me:0123456789abcdef\n")
    given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 2}
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        (name,) = group["labels"].values()
        labels = ",".join("=".join(label) for label in group["labels"].items())
        (container,) = group["template"]["spec"]["containers"]
        words = [f"--{param}={value}" for param, value in group["rayStartParams"].items()]
        words += [f"--num-cpus={container['resources']['limits']['cpu']}"]
        words += [f"--labels={labels}", f"--node-ip-address={HOSTS[name]}", "--block"]
        is_head = group is spec["headGroupSpec"]
        words += ["--head", f"--port={nodes.address.split(':')[1]}"] if is_head else [f"--address={nodes.address}"]
        variables = given | {variable["name"]: variable["value"] for variable in container["env"]}
        nodes.launch(name, [str(nodes.programs / "ray"), "start", *words], **variables)
    _, _, *words = shlex.split(job["spec"]["entrypoint"].replace("/run/secrets/hydra", str(nodes.folder)))
    words[words.index("0.0.0.0")] = "127.0.0.1"
    # As KubeRay and Ray's jobs set it for the head's container.
    assert_serves(nodes, words, **given, RAY_ADDRESS=nodes.address)

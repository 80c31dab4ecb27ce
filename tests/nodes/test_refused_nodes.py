"""Nodes of a real Ray cluster that `serve --cluster ray` refuses: by one sentence that names the node, within
seconds, and nothing stays in the cluster."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hydra_nodes.ray_launcher import START_S
from tests.gguf_files import write_gguf
from tests.nodes.test_ray import CPU_NODES, SOURCES, RayNodes, cluster, descendants, is_named, programs
from tests.server.test_served import DEMO, ROOT, Served
from tools.miniatures import make_tiny

__all__ = ["programs"]
pytestmark = pytest.mark.slow

# Another version of the engine, with everything else of this one.
OTHER_VERSION = """
from pathlib import Path
__path__ = [{folder!r}]
exec(Path({folder!r}, "__init__.py").read_text())
__version__ = "0.0.9"
"""
# What Ray prints itself, for example that a node was lost some time ago, goes elsewhere.
LEFT = """
import sys
import ray
from ray._private.state import actors
answers, sys.stdout = sys.stdout, sys.stderr
ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
groups = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
print(groups + [actor for actor in actors().values() if actor["State"] != "DEAD"], file=answers)
"""
HOLD = """
import sys, time
import ray
answers, sys.stdout = sys.stdout, sys.stderr
ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
group = ray.util.placement_group([{"CPU": float(sys.argv[3]), f"node:{sys.argv[2]}": 0.001}])
ray.get(group.ready())
print("held", file=answers, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(DEMO / "model", tmp_path_factory.mktemp("models") / "model"))


@pytest.fixture(scope="module")
def nodes(programs: Path, model: Path) -> Iterator[RayNodes]:
    """Node `a` is as it should be, `b` claims a GPU, `c` has other models in the folders, and `d` another engine."""
    make_tiny("qwen2_vl", model.parent / "tiny", seed=7)
    write_gguf(model.parent / "tiny", model.parent / "files")
    write_gguf(model.parent / "tiny", model.parent / "other files", "Q8_0")
    other = shutil.copytree(model, model.parent / "other")
    (other / "config.json").write_text(json.dumps(json.loads((other / "config.json").read_text()) | {"dtype": "half"}))
    engine = model.parent / "hydra_engine"
    engine.mkdir()
    (engine / "__init__.py").write_text(OTHER_VERSION.format(folder=str(ROOT / "hydra_engine")))
    binds = 'mount --bind other model && mount --bind "other files" files && cd - >/dev/null && exec "$@"'
    mounted = ("unshare", "--mount", "sh", "-c", f'cd "{model.parent}" && {binds}', "sh")
    if subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    with cluster(programs, "127.0.0.1") as started:
        started.start("b", "127.0.0.2", "--num-gpus", "1", XDG_CACHE_HOME=str(model.parent / "cache of b"))
        started.start("c", "127.0.0.3", within=mounted)
        started.start("d", "127.0.0.4", PYTHONPATH=f"{model.parent}:{SOURCES}")
        yield started


Refusal = Callable[..., tuple[int, str]]


@pytest.fixture
def refusal(nodes: RayNodes, model: Path, tmp_path: Path) -> Iterator[Refusal]:
    """A function that returns the exit code of a server that does not start, and its last line."""

    def refuse(topology: str, *options: str, served: Path = model, **variables: str) -> tuple[int, str]:
        command = [str(nodes.programs / "python"), "-m", "hydra_engine", "serve", str(served), "--port", "0"]
        command += ["--cluster", "ray", "--ray-address", nodes.address, "--topology", topology, *options]
        environment = nodes.environment | variables
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr.strip().splitlines()[-1]

    yield refuse
    assert run(nodes, LEFT) == "[]", "no placement group and no actor stays"
    left = [pid for process in nodes.processes.values() for pid in descendants(process.pid)]
    assert not [pid for pid in left if is_named(pid, "hydra_nodes")], "no process stays"


def run(nodes: RayNodes, program: str, *arguments: str) -> str:
    command = [str(nodes.programs / "python"), "-c", program, nodes.address, *arguments]
    done = subprocess.run(command, env=nodes.environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("topology", "code", "sentence"),
    [
        ("E@nowhere+PD@a", 4, "the Ray cluster has no node nowhere, only"),
        ("E@a:cuda:0+PD@b", 4, "node a has 0 GPU for Ray and the topology needs 1 there"),
        (f"{CPU_NODES + 1}E@b:cpu+PD@a", 4, f"node b has {CPU_NODES} CPU for Ray and the topology needs"),
        ("E@a+PD@b:cuda:0", 5, "instance pd0 on node b: device cuda:0 cannot be used: "),
        ("E@c+PD@a", 2, "instance e0 on node c: node 'c' has model digest"),
        ("E@a+PD@d", 2, "node d has hydra-engine 0.0.9, this one 0.1.0; all nodes need the same"),
    ],
)
def test_a_node_that_does_not_fit_is_named(refusal: Refusal, topology: str, code: int, sentence: str) -> None:
    assert_refused(refusal(topology), code, sentence)


def test_nodes_make_folders_of_their_own_for_gguf_files_and_need_the_same_files(
    refusal: Refusal, nodes: RayNodes, model: Path
) -> None:
    text, mmproj = sorted((model.parent / "files").iterdir(), key=lambda path: path.name.startswith("mmproj"))
    refused = refusal("E@c+PD@a", "--mmproj", str(mmproj), served=text)
    assert_refused(refused, 2, "instance e0 on node c: node 'c' has model digest")
    command = [str(nodes.programs / "python"), "-m", "hydra_engine", "serve", str(text), "--mmproj", str(mmproj)]
    command += ["--port", "0", "--cluster", "ray", "--ray-address", nodes.address, "--topology", "E@b:cpu+PD@a"]
    server = Served(command=command, environment=nodes.environment)
    server.end()
    assert server.process.returncode == 0
    assert list((model.parent / "cache of b").glob("hydra-engine/gguf/*/mmproj.gguf"))


def assert_refused(refused: tuple[int, str], code: int, sentence: str) -> None:
    assert refused[0] == code and refused[1].startswith(f"hydra-engine: {sentence}"), refused


def test_ray_that_is_not_reached_and_another_token(refusal: Refusal, nodes: RayNodes) -> None:
    refused = refusal("E@a+PD@a", "--ray-address", "127.0.0.1:1")
    assert_refused(refused, 2, "no Ray cluster is reached at 127.0.0.1:1 (Connection refused)")
    refused = refusal("E@a+PD@a", RAY_AUTH_TOKEN="another token of some length")
    assert_refused(refused, 2, "the Ray cluster cannot be joined: Failed to connect to Ray cluster at ")
    assert refused[1].endswith("is its token another than the one of this node, in RAY_AUTH_TOKEN?")
    doctor = [str(nodes.programs / "python"), "-m", "hydra_engine", "doctor", "--cluster", "ray"]
    doctor += ["--ray-address", nodes.address]
    said = subprocess.run(doctor, env=nodes.environment, capture_output=True, text=True, timeout=120).stdout
    assert "\n  ray                  2." in said and f"127.0.0.2, {CPU_NODES} CPU, 1 GPU\n" in said
    assert "\n  NIXL here " in said and "\n  RDMA here " in said


def test_cpus_that_others_use(refusal: Refusal, nodes: RayNodes) -> None:
    command = [str(nodes.programs / "python"), "-c", HOLD, nodes.address, "127.0.0.2", str(CPU_NODES)]
    holder = subprocess.Popen(command, env=nodes.environment, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        refused = refusal("E@b:cpu+PD@a")
        assert_refused(refused, 4, "what the topology needs is not free on node b: others use CPUs or GPUs there")
    finally:
        holder.kill()
        holder.communicate()


def test_a_node_that_dies_while_its_instance_starts(refusal: Refusal, nodes: RayNodes) -> None:
    nodes.start("dying", "127.0.0.5")

    def kill() -> None:
        give_up_s = time.monotonic() + START_S
        while time.monotonic() < give_up_s:
            if any(is_named(pid, "hydra_nodes.process") for pid in descendants(nodes.processes["dying"].pid)):
                nodes.kill_raylet("dying")
                return
            time.sleep(0.01)

    killing = threading.Thread(target=kill)
    killing.start()
    try:
        refused = refusal("E@dying:cpu+PD@a")
    finally:
        killing.join()
        nodes.end("dying")
    assert_refused(refused, 1, "instance e0 on node dying ")

"""The examples in deploy/: they are well formed, every flag, variable and path in them exists, and their first runs
answer."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import bootstrap
from hydra_engine.config import ServerConfig, parse_seconds
from hydra_engine.core.instances import Topology
from hydra_nodes.ray_launcher import HEADLESS
from tests.config.hub import Hub
from tests.packaging.flags import FLAG, ROOT, VARIABLE, commands, variables
from tests.packaging.test_dist import check_files, run

DEPLOY = ROOT / "deploy"
DOCKERFILES = [DEPLOY / "Dockerfile", DEPLOY / "Dockerfile.cuda"]
UNIT = DEPLOY / "hydra-engine.service"
SERVE = commands()["serve"]


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def compose(name: str = "compose.yml") -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(text_of(DEPLOY / name))
    return document


def kuberay() -> tuple[dict[str, Any], dict[str, Any]]:
    """The Service and the RayJob."""
    service, job = yaml.safe_load_all(text_of(DEPLOY / "kuberay.yml"))
    return service, job


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yml")), ids=lambda path: path.name)
def test_yaml_is_well_formed(path: Path) -> None:
    documents = list(yaml.safe_load_all(text_of(path)))
    assert documents and all(isinstance(document, dict) for document in documents)


@pytest.mark.parametrize("path", sorted(p for p in DEPLOY.rglob("*") if p.is_file()), ids=lambda path: path.name)
def test_every_variable_exists(path: Path) -> None:
    own = {"HYDRA_MODEL_DIR"} if path.name.startswith("compose") else set()  # a variable of the Compose files
    assert not set(VARIABLE.findall(text_of(path))) - variables() - own


def served_flags(arguments: str) -> set[str]:
    return set(FLAG.findall(arguments))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_start_the_server_as_nobody_with_keys_and_a_health_check(path: Path) -> None:
    text = text_of(path)
    (entry,) = re.findall(r'^ENTRYPOINT \["hydra-engine", "serve", (.*)\]$', text, re.MULTILINE)
    assert served_flags(entry) == {"host", "api-key-file"} <= SERVE
    assert '"0.0.0.0"' in entry and '"/run/secrets/hydra_keys"' in entry
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE) and "HEALTHCHECK" in text and "/livez" in text
    assert "STOPSIGNAL SIGTERM" in text and f"EXPOSE {ServerConfig().port}" in text


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_all_that_an_image_writes_is_in_its_volume_and_belongs_to_its_user(path: Path) -> None:
    text = text_of(path)
    (volume,) = re.findall(r"^VOLUME (\S+)$", text, re.MULTILINE)
    assert "useradd --system --uid 10001 --user-group --no-create-home --home-dir /nonexistent hydra \\\n" in text
    assert f"install -d -o hydra -g hydra {volume}\n" in text
    folders = dict(re.findall(r"(XDG_CACHE_HOME|HF_HOME|TRITON_CACHE_DIR)=(\S+)", text))
    assert f"{folders.pop('XDG_CACHE_HOME')}/hydra-engine" == volume
    assert folders and all(folder.startswith(f"{volume}/") for folder in folders.values())
    assert "HF_HOME" in folders and ("TRITON_CACHE_DIR" in folders) == (path.suffix == ".cuda")
    (mounted,) = (v for v in compose()["services"]["engine"]["volumes"] if v.startswith("cache:"))
    assert mounted == f"cache:{volume}"


def test_the_image_for_a_gpu_has_what_triton_compiles_with() -> None:
    build, final = text_of(DEPLOY / "Dockerfile.cuda").split("\nFROM ")[1:]
    assert {"gcc", "libc6-dev", "python3-dev"} <= set(final.split()) and "HYDRA_REQUIRE_CUDA=1" in build
    # The same torch as bootstrap.py on a machine with a driver: of PyPI, in the version of constraints.txt.
    assert """pip install "$(grep '^torch==' constraints.txt)" \\""" in build and "index-url" not in build


def hadolint() -> str | None:
    return shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.slow
@pytest.mark.skipif(hadolint() is None, reason="hadolint is not here; `make build` installs it")
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    # DL3008: versions of Debian's packages are those of the base image's release.
    command = [str(hadolint()), "--no-color", "--ignore", "DL3008", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def context(folder: Path) -> None:
    """Copies what .dockerignore lets through, of its forms `*`, `!PATTERN` and `**/PATTERN`."""
    everything, *lines = [line for line in text_of(ROOT / ".dockerignore").splitlines() if not line.startswith("#")]
    assert everything == "*"
    left_out = shutil.ignore_patterns(*(line.removeprefix("**/") for line in lines if line.startswith("**/")))
    kept = (path for line in lines if line.startswith("!") for path in ROOT.glob(line.removeprefix("!")))
    for path in kept:
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=left_out)
        else:
            shutil.copy2(path, folder / path.name)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # compiles
@pytest.mark.skipif(not (ROOT / "build" / "native").exists(), reason="nothing is built here yet")
def test_the_wheel_of_an_image_is_built_of_what_dockerignore_lets_through(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    context(source)
    assert not list(source.rglob("*.so"))
    for copied in re.findall(r"^COPY (?!--from)(\S+)", text_of(DEPLOY / "Dockerfile"), re.MULTILINE):
        assert (source / copied).exists()
    shutil.copytree(ROOT / "build" / "native", source / "build" / "native")  # valid by the times of their sources
    (arguments,) = re.findall(r"pip wheel (.*) -w /wheels \.", text_of(DEPLOY / "Dockerfile"))
    pip = [sys.executable, "-m", "pip", "wheel", *arguments.split(), "-w", tmp_path / "wheels", "."]
    run(*pip, cwd=source, HYDRA_CPU_ONLY="1")
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    check_files(wheel)


# ---- first runs


def first_run(path: Path) -> str:
    """The commands in the head of a file."""
    found = re.search(r'ends with "Two plus three is five\."[:.]\n#\n((?:#     .*\n)+)', text_of(path))
    assert found is not None
    return re.sub("^#     ", "", found[1], flags=re.MULTILINE)


@pytest.mark.parametrize("path", [DEPLOY / "Dockerfile", UNIT], ids=lambda path: path.name)
def test_the_operations_document_has_the_first_run_of(path: Path) -> None:
    assert f"```sh\n{first_run(path)}```\n" in text_of(ROOT / "docs" / "operations.md")


@pytest.mark.parametrize("path", [ROOT / "docs/quickstart.md", ROOT / "docs/operations.md", UNIT], ids=lambda p: p.name)
def test_no_install_can_bring_cuda_by_accident(path: Path) -> None:
    text = re.sub(r"\s*\\\n#?\s*", " ", text_of(path))
    installs = [line for line in text.split("\n") if "pip install" in line and re.search(r"dist/\*\.whl(?!\))", line)]
    assert installs
    for line in installs:
        assert f"--extra-index-url {bootstrap.CPU_INDEX} 'torch=={bootstrap.pinned('torch')}+cpu' dist/*.whl" in line


@contextmanager
def container(folder: Path, *arguments: str, **variables: str) -> Iterator[str]:
    """The URL of what the image's entry point serves, with its variables, where /var/cache and /run are in `folder`."""
    text = text_of(DEPLOY / "Dockerfile")
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    _, *words = json.loads(entry.replace("/run/secrets", str(folder)).replace("0.0.0.0", "127.0.0.1"))
    named = dict(re.findall(r"(XDG_CACHE_HOME|HF_HOME)=(\S+)", text.replace("/var/cache", str(folder / "cache"))))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "cache" / "hydra-engine").mkdir(parents=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HYDRA_"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "hydra_engine", *words, "--port", str(port), "--threads", "1", *arguments],
        cwd=folder,
        env=kept | named | variables | {"HOME": "/nonexistent", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
    )
    try:
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()


@pytest.mark.slow
def test_a_container_downloads_into_its_volume_and_answers_the_first_question(tmp_path: Path) -> None:
    _, keys, *_ = lines = first_run(DEPLOY / "Dockerfile").splitlines()
    question = "\n".join(lines[-3:]).replace('"model": "demo", ', '"model": "acme/demo", ')
    assert "acme/demo" in question and question.startswith("curl ")
    subprocess.run(["sh", "-c", keys], cwd=tmp_path, check=True)
    assert (tmp_path / "hydra_keys").stat().st_mode & 0o777 == 0o640
    files = {path.name: path.read_bytes() for path in (ROOT / "hydra_engine" / "demo" / "model").iterdir()}
    with (
        Hub("acme/demo", files).serving() as hub,
        container(tmp_path, "acme/demo", "--download", HF_ENDPOINT=hub.url) as url,
    ):
        command = ["sh", "-c", question.replace("http://127.0.0.1:8000", url)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "Two plus three is five.", done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"hydra_keys", "cache"}
    assert (tmp_path / "cache/hydra-engine/huggingface/hub/models--acme--demo").is_dir()


# ---- images


@pytest.mark.parametrize(
    ("programs", "status", "sentence"),
    [
        ({}, 1, "images need podman, buildah or docker: none of them is installed\n"),
        ({"docker": "exit 1"}, 1, "docker is installed, but `docker info` fails (is its daemon running?)\n"),
        ({"podman": "exit 1", "docker": 'echo "$@"'}, 0, ""),
    ],
    ids=["nothing", "no daemon", "docker"],
)
def test_make_images_says_what_is_missing(programs: dict[str, str], status: int, sentence: str, tmp_path: Path) -> None:
    for name, body in {"dirname": 'exec /usr/bin/dirname "$@"', **programs}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    command = ["/bin/sh", str(DEPLOY / "build-images.sh"), "cpu", "cuda"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == status and done.stderr.endswith(sentence)
    if not status:
        assert done.stdout == (
            "build -f deploy/Dockerfile -t hydra-engine .\nbuild -f deploy/Dockerfile.cuda -t hydra-engine:cuda .\n"
        )


def test_the_cpu_image_pins_torch_and_has_no_host_of_its_own() -> None:
    text = re.sub(r"^#.*\n", "", text_of(DEPLOY / "Dockerfile"), flags=re.MULTILINE)
    assert re.findall(r"https?://[^/\s\"]+", text) == ["https://download.pytorch.org", "http://127.0.0.1:8000"]
    assert len(re.findall(r"^torch==", text_of(ROOT / "constraints.txt"), re.MULTILINE)) == 1


@pytest.mark.parametrize("name", ["compose.yml", "compose.cluster.yml"])
def test_the_compose_file_names_what_is_there(name: str) -> None:
    document = compose(name)
    declared = {kind: set(document[kind]) for kind in ("secrets", "volumes")}
    for service in document["services"].values():
        assert set(service.get("secrets", [])) <= declared["secrets"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert service["cap_drop"] == ["ALL"] and "no-new-privileges:true" in service["security_opt"]
        assert service["restart"] == "unless-stopped"
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), source
            elif not source.startswith("${"):
                assert source in declared["volumes"]
    for secret in document["secrets"].values():
        assert secret["file"].startswith("./secrets/")
    assert "/deploy/secrets/" in text_of(ROOT / ".gitignore").split()


def test_the_engine_of_the_compose_file_has_time_to_drain() -> None:
    engine = compose()["services"]["engine"]
    assert engine["read_only"] is True
    command = engine["command"]
    assert {word.removeprefix("--") for word in command if word.startswith("--")} <= SERVE
    assert parse_seconds(engine["stop_grace_period"], "") > float(command[command.index("--shutdown-timeout") + 1])
    dockerfile = (DEPLOY / engine["build"]["context"] / engine["build"]["dockerfile"]).resolve()
    assert dockerfile == DEPLOY / "Dockerfile"


def test_the_hosts_of_the_compose_file_are_nodes_of_its_topology() -> None:
    services = compose("compose.cluster.yml")["services"]
    server = services.pop("server")
    words = dict(word.removeprefix("--").split("=", 1) for word in server["command"][1:])
    assert words.keys() <= SERVE
    assert parse_seconds(server["stop_grace_period"], "") > float(words["shutdown-timeout"])
    nodes = set()
    for name, service in services.items():
        address = service["networks"]["hosts"]["ipv4_address"]
        assert {f"--node-name={name}", f"--node-ip-address={address}"} <= set(service["command"])
        assert ("ports" in service) == (name == "a") and service["secrets"] == ["ray_token"]
        nodes.add(name)
        assert server["depends_on"][name] == {"condition": "service_healthy"}
    assert nodes_in(words["topology"]) == nodes
    first = services["a"]["networks"]["hosts"]["ipv4_address"]
    assert words["ray-address"] == f"{first}:6379" and "--port=6379" in services["a"]["command"]
    assert services["a"]["build"]["args"] == {"EXTRAS": "video,ray"}


def nodes_in(topology: str) -> set[str]:
    spelled = re.sub(r"^\$\{HYDRA_TOPOLOGY:-(.*)\}$", r"\1", topology)
    return {spec.node for spec in Topology.parse(spelled, nodes=True).instances}


def test_the_pods_of_kuberay_are_nodes_of_its_topology() -> None:
    service, job = kuberay()
    spec = job["spec"]["rayClusterSpec"]
    head, *workers = groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    serve, model, *words = job["spec"]["entrypoint"].split()[1:]
    assert (serve, model) == ("serve", "demo") and served_flags(" ".join(words)) <= SERVE
    flags = dict(zip(words[::2], words[1::2], strict=True))
    assert nodes_in(flags["--topology"]) == {group["labels"]["hydra-engine/node"] for group in groups}
    assert [group["groupName"] for group in workers] == ["b", "c"]
    assert spec["authOptions"] == {"mode": "token"}
    assert f'"ray=={spec["rayVersion"]}"' in text_of(ROOT / "tools" / "ray_environment.py")
    for pod in (group["template"]["spec"] for group in groups):
        (container,) = pod["containers"]
        mounted, volumes = container["volumeMounts"], {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in mounted} == volumes and container["image"] == "hydra-engine:ray"
        assert {"name": HEADLESS[0], "value": HEADLESS[1]} in container["env"]
    variables = {variable["name"]: variable["value"] for variable in head["template"]["spec"]["containers"][0]["env"]}
    assert float(variables["RAY_JOB_STOP_WAIT_TIME_S"]) > float(flags["--shutdown-timeout"])
    labels = head["template"]["metadata"]["labels"] | {"ray.io/node-type": "head"}
    assert service["spec"]["selector"] == labels
    assert service["spec"]["ports"][0]["port"] == ServerConfig().port


def test_prometheus_asks_the_engine_with_its_key() -> None:
    document = compose()
    (job, *_) = yaml.safe_load(text_of(DEPLOY / "compose-prometheus.yml"))["scrape_configs"]
    (target,) = (target for group in job["static_configs"] for target in group["targets"])
    name, _, port = target.partition(":")
    assert name in document["services"] and int(port) == ServerConfig().port
    folder, _, secret = job["authorization"]["credentials_file"].rpartition("/")
    assert folder == "/run/secrets" and secret in document["services"]["prometheus"]["secrets"]
    assert job.get("metrics_path", "/metrics") == "/metrics"


def unit_values(key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", text_of(UNIT), re.MULTILINE)


def test_the_unit_starts_drains_and_reloads() -> None:
    (start,) = unit_values("ExecStart")
    assert re.match(r"\S+/hydra-engine serve --", start) and served_flags(start) <= SERVE
    timeout = float(re.findall(r"--shutdown-timeout (\S+)", start)[0])
    assert float(unit_values("TimeoutStopSec")[0]) > timeout
    assert unit_values("KillSignal") == ["SIGTERM"] and unit_values("KillMode") == ["mixed"]
    assert unit_values("ExecReload") == ["/bin/kill -HUP $MAINPID"] and "--api-key-file" in start
    # What its head installs is here, and is what the unit reads.
    for path in re.findall(r"deploy/[\w.-]+", text_of(UNIT)):
        assert (ROOT / path).exists(), path
    assert unit_values("EnvironmentFile") == ["/etc/hydra-engine/environment"]
    # The one folder that it may write to has what is downloaded.
    assert unit_values("ProtectSystem") == ["strict"] and unit_values("CacheDirectory") == ["hydra-engine"]
    assert unit_values("Environment") == ["XDG_CACHE_HOME=/var/cache HF_HOME=/var/cache/hydra-engine/huggingface"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(text_of(UNIT).replace("/opt/hydra-engine/bin/hydra-engine", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and UNIT.name not in done.stderr, done.stderr

"""The examples in deploy/: they are well formed, and every flag, variable and path in them exists."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hydra_engine.config import ServerConfig, parse_seconds
from tests.packaging.flags import FLAG, ROOT, VARIABLE, commands, variables

DEPLOY = ROOT / "deploy"
DOCKERFILES = [DEPLOY / "Dockerfile", DEPLOY / "Dockerfile.cuda"]
UNIT = DEPLOY / "hydra-engine.service"
SERVE = commands()["serve"]


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(text_of(DEPLOY / "compose.yml"))
    return document


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yml")), ids=lambda path: path.name)
def test_yaml_is_well_formed(path: Path) -> None:
    assert isinstance(yaml.safe_load(text_of(path)), dict)


@pytest.mark.parametrize("path", sorted(p for p in DEPLOY.rglob("*") if p.is_file()), ids=lambda path: path.name)
def test_every_variable_exists(path: Path) -> None:
    own = {"HYDRA_MODEL_DIR"} if path.name == "compose.yml" else set()  # a variable of the Compose file
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
    # Every file of the build is in the context, and what the build needs is not ignored.
    ignored = text_of(ROOT / ".dockerignore").split()
    for name in (
        "constraints.txt",
        "csrc",
        "hydra_engine",
        "hydra_planner",
        "hydra_terminal",
        "hydra_quantizer",
        "hydra_transformers",
        "kernels",
        "pyproject.toml",
        "setup.py",
        "README.md",
    ):
        assert f"!{name}" in ignored and (ROOT / name).exists()
    for source in re.findall(r"^COPY (?!--from)(\S+)", text, re.MULTILINE):
        assert (ROOT / source).exists()


def test_the_cpu_image_pins_torch_and_has_no_host_of_its_own() -> None:
    text = text_of(DEPLOY / "Dockerfile")
    assert re.findall(r"https?://[^/\s\"]+", text) == ["https://download.pytorch.org", "http://127.0.0.1:8000"]
    assert len(re.findall(r"^torch==", text_of(ROOT / "constraints.txt"), re.MULTILINE)) == 1


def test_the_compose_file_names_what_is_there() -> None:
    document = compose()
    declared = {kind: set(document[kind]) for kind in ("secrets", "volumes")}
    for service in document["services"].values():
        assert set(service.get("secrets", [])) <= declared["secrets"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert service["cap_drop"] == ["ALL"] and "no-new-privileges:true" in service["security_opt"]
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


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(text_of(UNIT).replace("/opt/hydra-engine/bin/hydra-engine", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and UNIT.name not in done.stderr, done.stderr

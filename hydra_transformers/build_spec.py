"""Asks transformers for the spec of a checkpoint, once per state of its directory."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile

import msgspec

from hydra_engine.core.processes import launch
from hydra_engine.core.processes.preloaded import CURRENT, INHERITED, Preloaded
from hydra_engine.errors import CheckpointError, ConfigError, from_info
from hydra_engine.models.specs.assemble import ModelFiles
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.specs.quantization import read_quantization
from hydra_transformers.spec import Answer

_DESCRIBE_SECONDS = 300.0
_COMMAND = launch.command("hydra_transformers.describe")


def build_generic(files: ModelFiles) -> ModelSpec:
    """Builds the spec of a checkpoint through transformers. Raises CheckpointError, with the reason, if the adapter
    cannot run it, ConfigError if quantisation is asked for."""
    if (wanted := files.options.quantization) != "auto":
        raise ConfigError(
            f"quantization {wanted} needs a native model; modules of transformers run unquantised weights",
            param="quantization",
        )
    text = files.config.section_if_present("text_config")
    if read_quantization(files.model_dir, files.config, text) is not None:
        raise CheckpointError("the weights are quantised; --model-impl transformers runs unquantised ones only")
    return _describe(str(files.model_dir), files.options.trust_remote_code, _stamp(files.model_dir))


def _stamp(model_dir: Path) -> tuple[tuple[str, int, int], ...]:
    """Returns a value that changes if a file that determines the description changes."""
    stats = [(path.name, path.stat()) for path in model_dir.iterdir() if path.suffix in (".json", ".jinja", ".py")]
    return tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats))


@functools.lru_cache(maxsize=8)
def _describe(model_dir: str, trust_remote_code: bool, stamp: object) -> ModelSpec:
    """Returns the answer that the frontend has got, if that is known here. Otherwise runs `describe` in this process if
    torch is loaded, else (in the frontend) in a separate one."""
    name = _name(model_dir, trust_remote_code, stamp)
    if (inherited := INHERITED.get(name)) is not None:
        return msgspec.json.decode(inherited, type=Answer).model_spec()
    if "torch" in sys.modules:
        # Imports transformers' models and torch.
        from hydra_transformers.describe import describe

        return describe(Path(model_dir), trust_remote_code=trust_remote_code)
    spec = describe_in_process(model_dir, trust_remote_code)
    if (preloaded := CURRENT.get()) is not None:
        preloaded.bequeath(name, msgspec.json.encode(Answer.from_spec(spec)))
    return spec


def _name(model_dir: str, trust_remote_code: bool, stamp: object) -> str:
    """Returns the name under which forks inherit the answer."""
    return f"{__name__}: {(model_dir, trust_remote_code, stamp)}"


def describe_in_process(model_dir: str, trust_remote_code: bool) -> ModelSpec:
    flags = ["--trust-remote-code"] if trust_remote_code else []
    package_parent = str(Path(__file__).parents[1])
    # API keys are no business of code that may come with a model.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HYDRA_")}
    path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    variables |= {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    try:
        output, status = _run([*_COMMAND, model_dir, *flags], variables, CURRENT.get())
    except (OSError, subprocess.TimeoutExpired):
        raise CheckpointError("the process that asks transformers about the model did not answer") from None
    try:
        # The answer is the last line: libraries may write to the same place.
        answer = msgspec.json.decode(output.splitlines()[-1], type=Answer)
    except (IndexError, msgspec.MsgspecError):
        raise CheckpointError(f"transformers failed to read the model (exit status {status})") from None
    if answer.error is not None:
        raise from_info(answer.error)
    return answer.model_spec()


def _run(command: list[str], environment: dict[str, str], preloaded: Preloaded | None) -> tuple[bytes, int]:
    """Returns what a command writes, and its exit status. Raises OSError, TimeoutExpired."""
    if preloaded is None or not preloaded.is_alive:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_DESCRIBE_SECONDS,
            env=environment | launch.parent_variable(),
        )
        return done.stdout, done.returncode
    with TemporaryFile() as output, open(os.devnull, "r+b") as nothing:
        descriptors = {0: nothing.fileno(), 1: output.fileno(), 2: nothing.fileno()}
        process = preloaded.fork(command, descriptors, environment, new_session=True)
        try:
            status = process.wait(_DESCRIBE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        output.seek(0)
        return output.read(), status

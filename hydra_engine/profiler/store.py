"""Profiles on disk: the step times of a model on a machine, so that the next start does not measure again.

A file is used only if it is intact, of the same model and machine, covers steps that are large enough, and every number
is in range; otherwise `load` gives the reason and the caller measures again.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from hydra_engine import profile_file
from hydra_engine.core.cost import CostSurface, Curve
from hydra_engine.core.model_folder import read_file
from hydra_engine.profile_file import Refused
from hydra_engine.profiler.fit import Samples

SCHEMA = 1
_LONGEST_S = 3600.0
_MOST = 1e6  # slowdowns and errors
_BOUNDS = (  # of the surface's numbers
    (("per_key_s", "per_pair_s", "per_chunk_s", "per_decode_s", "per_patch_pair_s"), 0.0, _LONGEST_S),
    (("decode_slowdown", "prefill_slowdown", "vision_slowdown"), 1.0, _MOST),
    (("language_error", "vision_error", "corun_error"), 0.0, _MOST),
)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model, machine and settings of a profile. `model` is a hash of the configuration and of the weight files'
    names, sizes and times. The fields from `gpu` on are empty in older profiles and where they do not apply."""

    model: str
    device: str
    processor: str
    cores: int
    threads: int
    lane_priority: str
    dtype: str
    backend: str
    deterministic: bool
    sliced: bool  # encodes can pause inside layers, which costs something
    block_size: int
    engine: str
    role: str = "EPD"
    schema: int = SCHEMA
    gpu: str = ""  # its name; `device` only numbers it
    attention: str = ""  # whose kernels read the cache on a GPU
    sm_split: str = ""  # "32,64": multiprocessors for tokens at each place
    graphs: str = ""  # rows for which decode steps are captured: "default", whatever the most rows are, or "1,2,4"
    model_impl: str = ""  # what computes the model; empty: the engine's own
    encode_graphs: str = ""  # patches for which encodes are captured: "default", whatever the most are, or "256,1024"
    quantization: str = ""  # "int4": what unquantised weights became while they were loaded
    kv_cache_dtype: str = ""  # "int8": keys and values are quantized
    step_graphs: int = 0  # tokens of the largest step with prompts that is captured


_LATER = (
    *("gpu", "attention", "sm_split", "graphs", "model_impl", "encode_graphs", "quantization", "kv_cache_dtype"),
    "step_graphs",
)


class Reach(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The largest steps of the grid."""

    rows: int  # of a language step
    decodes: int
    patches: int  # of a vision step

    def covers(self, other: Reach) -> bool:
        return self.rows >= other.rows and self.decodes >= other.decodes and self.patches >= other.patches


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured cost surface with its origin. `submit_s` and `collect_s`: overhead of a step, see
    `calibrate.Calibration`; `measured_at` is UTC."""

    identity: Identity
    reach: Reach
    surface: CostSurface
    samples: Samples
    submit_s: float
    collect_s: float
    num_points: int
    num_left: int
    seconds: float
    measured_at: str
    notes: tuple[str, ...] = ()
    other_load: float = 0.0  # the share of the cores that other programs had meanwhile


def model_identity(directory: Path) -> str:
    """Hex digest of config.json and of names, sizes and modification times of the weight files."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(read_file(directory, "config.json") or b"")
    for path in sorted(directory.iterdir()):
        if path.suffix in _WEIGHTS:
            facts = path.stat()
            digest.update(f"\n{path.name} {facts.st_size} {facts.st_mtime_ns}".encode())
    return digest.hexdigest()


def file_name(directory: Path, identity: Identity) -> str:
    """Name of the profile of a model directory and settings, the same for other versions of the model or the engine, so
    that an outdated profile is replaced. Empty fields of `_LATER` are left out, so that older profiles keep their
    name."""
    lasting = msgspec.structs.replace(identity, model=str(directory.resolve()), engine="", schema=0)
    settings = {key: value for key, value in msgspec.structs.asdict(lasting).items() if value or key not in _LATER}
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", directory.resolve().name)[:40]
    return f"{name}-{hashlib.blake2b(msgspec.json.encode(settings), digest_size=8).hexdigest()}.json"


def save(profile: Profile, path: Path) -> None:
    """Writes the profile atomically, with mode 0600. Raises OSError."""
    profile_file.write(path, profile)


def load(path: Path, identity: Identity, reach: Reach) -> Profile | None:
    """Loads a profile; None if there is no file. Raises Refused with the reason if the file cannot be used."""
    profile = profile_file.read(path, Profile)
    if profile is None:
        return None
    if profile.identity != identity:
        raise Refused(_difference(profile.identity, identity))
    if not profile.reach.covers(reach):
        raise Refused("the configuration allows larger steps than were measured")
    if (problem := problem_of(profile)) is not None:
        raise Refused(f"a number is out of range: {problem}")
    return profile


def problem_of(profile: Profile) -> str | None:
    """Describes the first number that is out of range; None if there is none."""
    surface = profile.surface
    checks = [
        *_curve_problems("rows", surface.rows, min_s=1e-9),
        *_curve_problems("patches", surface.patches, min_s=0.0),
    ]
    for names, least, most in _BOUNDS:
        checks += [_out_of(name, [getattr(surface, name)], least, most) for name in names]
    checks.append(_out_of("splits", _numbers(msgspec.to_builtins(surface.splits)), 1.0, _MOST))
    checks.append(_out_of("times", (profile.submit_s, profile.collect_s, profile.seconds), 0.0, _LONGEST_S))
    checks.append(_out_of("other_load", [profile.other_load], 0.0, 1.0))
    checks.append(_out_of("samples", _numbers(msgspec.to_builtins(profile.samples)), 0.0, 1e18))
    return next((check for check in checks if check is not None), None)


def _difference(then: Identity, now: Identity) -> str:
    names = [name for name in Identity.__struct_fields__ if getattr(then, name) != getattr(now, name)]
    if names == ["model"]:
        return "the model's files have changed"
    return "it was measured with " + ", ".join(_had(name, getattr(then, name)) for name in names)


def _had(name: str, value: object) -> str:
    if name == "model":
        return "another state of the model's files"
    return f"no {name}" if name in _LATER and not value else f"{name} {str(value)[:60]}"


def _curve_problems(name: str, curve: Curve, min_s: float) -> Iterator[str | None]:
    if not curve.knots or len(curve.knots) != len(curve.seconds):
        yield f"{name} has {len(curve.knots)} knots and {len(curve.seconds)} values"
    yield _out_of(f"knots of {name}", curve.knots, 0.0, 1e12)
    yield _out_of(f"seconds of {name}", curve.seconds, min_s, _LONGEST_S)
    if any(high <= low for low, high in pairwise(curve.knots)):
        yield f"knots of {name} do not ascend"
    if any(high < low for low, high in pairwise(curve.seconds)):
        yield f"{name} falls somewhere"


def _out_of(name: str, values: Iterable[float], minimum: float, maximum: float) -> str | None:
    wrong = [value for value in values if not (math.isfinite(value) and minimum <= value <= maximum)]
    return f"{name} has {wrong[0]:g}" if wrong else None


def _numbers(value: object) -> Iterator[float]:
    """Yields all numbers in nested lists and mappings."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, Mapping):
        yield from _numbers(list(value.values()))
    elif isinstance(value, Sequence):
        for item in value:
            yield from _numbers(item)

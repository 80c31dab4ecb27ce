"""Saved profiles are read again; damaged, foreign, outdated, too small or absurd ones are not."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hydra_engine.core.cost import Curve, Slowdowns
from hydra_engine.core.plans import VisionLoad
from hydra_engine.profiler.fit import LanguageTimes, Samples, VisionTimes
from hydra_engine.profiler.store import (
    Identity,
    Profile,
    Reach,
    Refused,
    file_name,
    load,
    model_identity,
    problem_of,
    save,
)
from tests.examples import examples
from tests.profiler.fakes import SURFACE, decodes

IDENTITY = Identity("abc", "cpu", "a processor", 2, 2, "throughput", "bfloat16", "native", True, False, 16, "0.1.0")
REACH = Reach(rows=512, decodes=64, patches=1024)
SAMPLES = Samples(language=(LanguageTimes(decodes(4, 100), (0.01, 0.011)),), vision=())
PROFILE = Profile(IDENTITY, REACH, SURFACE, SAMPLES, 1e-4, 2e-4, 50, 3, 12.5, "2026-01-02T03:04:05Z", ("a note",))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "deep" / "profile.json"
    save(PROFILE, path)
    return path


def test_it_comes_back_as_it_was_and_is_for_its_owner_alone(file: Path) -> None:
    assert load(file, IDENTITY, REACH) == PROFILE
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["profile.json"], "no temporary file stays"


def test_a_file_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    assert load(tmp_path / "none.json", IDENTITY, REACH) is None


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.integers(0, 1 << 20), value=st.integers(0, 255), cut=st.booleans())
def test_no_damage_goes_unnoticed(file: Path, place: int, value: int, cut: bool) -> None:
    whole = file.read_bytes()
    place %= len(whole)
    damaged = whole[:place] if cut else whole[:place] + bytes([value]) + whole[place + 1 :]
    other = file.with_name("damaged.json")
    other.write_bytes(damaged)
    if damaged == whole:
        return
    try:
        assert load(other, IDENTITY, REACH) == PROFILE, "the same content in other words at most"
    except Refused as reason:
        assert "damaged" in str(reason)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"digest": "x"}', b"9" * 100], ids=repr)
def test_other_files_are_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(Refused, match="damaged, or of another version"):
        load(file, IDENTITY, REACH)


def test_a_huge_file_is_not_read_through(file: Path) -> None:
    file.write_bytes(b" " * (5 << 20))
    with pytest.raises(Refused, match="MiB"):
        load(file, IDENTITY, REACH)


def test_a_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be read"):
        load(tmp_path, IDENTITY, REACH)


@pytest.mark.parametrize("name", Identity.__struct_fields__)
def test_another_machine_model_or_setting_is_refused_and_named(file: Path, name: str) -> None:
    value = getattr(IDENTITY, name)
    other = not value if isinstance(value, bool) else (value + 1 if isinstance(value, int) else value + "x")
    had = f"no {name}$" if not value and not isinstance(value, bool) else f"{name} {value}"
    with pytest.raises(Refused, match="model's files" if name == "model" else f"measured with {had}"):
        load(file, msgspec.structs.replace(IDENTITY, **{name: other}), REACH)


def test_smaller_steps_are_covered_and_larger_ones_are_not(file: Path) -> None:
    assert load(file, IDENTITY, Reach(256, 8, 0)) == PROFILE
    for wanted in (Reach(513, 64, 1024), Reach(512, 65, 1024), Reach(512, 64, 1025)):
        with pytest.raises(Refused, match="larger steps"):
            load(file, IDENTITY, wanted)


NONSENSE = {
    "an empty curve": {"rows": Curve((), ())},
    "more knots than values": {"rows": Curve((1.0, 2.0), (1.0,))},
    "knots out of order": {"rows": Curve((2.0, 1.0), (1.0, 2.0))},
    "a falling curve": {"patches": Curve((1.0, 2.0), (2.0, 1.0))},
    "a step for nothing": {"rows": Curve((1.0,), (0.0,))},
    "a step of days": {"rows": Curve((1.0,), (1e6,))},
    "a negative price": {"per_key_s": -1e-9},
    "a price without end": {"per_pair_s": float("inf")},
    "not a number": {"per_chunk_s": float("nan")},
    "a negative decode": {"per_decode_s": -1.0},
    "a speed-up": {"decode_slowdown": 0.5},
    "an endless slowdown": {"vision_slowdown": float("inf")},
    "a negative error": {"corun_error": -0.1},
    "a speed-up on a partition": {"splits": (Slowdowns(1.5, 2.0, 0.9),)},
}


@pytest.mark.parametrize("change", NONSENSE.values(), ids=NONSENSE)
def test_numbers_that_make_no_sense_are_refused(file: Path, change: dict[str, object]) -> None:
    bad = msgspec.structs.replace(PROFILE, surface=replace(SURFACE, **change))
    assert problem_of(PROFILE) is None and problem_of(bad) is not None
    save(bad, file)
    with pytest.raises(Refused):
        load(file, IDENTITY, REACH)


def test_times_and_loads_are_checked_too() -> None:
    for samples in (
        Samples(language=(LanguageTimes(decodes(1, 5), (-1.0,)),)),
        Samples(language=(LanguageTimes(decodes(-1, 5), (1.0,)),)),
        Samples(vision=(VisionTimes(VisionLoad(-5, 1.0), (1.0,)),)),
    ):
        assert problem_of(msgspec.structs.replace(PROFILE, samples=samples)) is not None


def test_a_failed_write_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        save(msgspec.structs.replace(PROFILE, seconds=1.0), file)
    assert load(file, IDENTITY, REACH) == PROFILE
    assert [path.name for path in file.parent.iterdir()] == ["profile.json"]


def test_the_name_says_directory_and_setting_but_not_versions(tmp_path: Path) -> None:
    name = file_name(tmp_path, IDENTITY)
    assert name == file_name(tmp_path, msgspec.structs.replace(IDENTITY, model="new", engine="9.9", schema=7))
    assert name != file_name(tmp_path, msgspec.structs.replace(IDENTITY, threads=1))
    assert name != file_name(tmp_path / "other", IDENTITY)
    assert "/" not in file_name(Path("/some where/ünusual name"), IDENTITY)


LATER = ("gpu", "attention", "sm_split", "graphs", "model_impl")


def test_what_was_added_later_is_part_of_the_name_where_there_is_something_to_say() -> None:
    """A profile from before keeps its name, which was written down then."""
    directory = Path("/models/some-model")
    before = file_name(directory, IDENTITY)
    assert before == "some-model-590fc824ae685ce9.json"
    others = {file_name(directory, msgspec.structs.replace(IDENTITY, **{name: "x"})) for name in LATER}
    assert len(others | {before}) == 1 + len(LATER)


def test_a_profile_from_before_holds_where_there_is_nothing_to_say(tmp_path: Path) -> None:
    body = msgspec.to_builtins(PROFILE)
    for name in LATER:
        del body["identity"][name]
    encoded = msgspec.json.encode(body)
    digest = hashlib.blake2b(encoded, digest_size=32).hexdigest()
    path = tmp_path / "old.json"
    path.write_bytes(msgspec.json.encode({"digest": digest, "profile": body}))
    assert load(path, IDENTITY, REACH) == PROFILE
    with pytest.raises(Refused, match=r"measured with no sm_split, no graphs$"):
        load(path, msgspec.structs.replace(IDENTITY, sm_split="32", graphs="default"), REACH)


def test_a_model_is_another_one_when_its_files_change(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1234")
    os.utime(weights, ns=(0, 0))
    first = model_identity(tmp_path)
    (tmp_path / "README.md").write_text("hello")
    assert model_identity(tmp_path) == first
    os.utime(weights, ns=(1, 1))
    touched = model_identity(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert len({first, touched, model_identity(tmp_path)}) == 3

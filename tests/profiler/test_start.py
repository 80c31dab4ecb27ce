"""Surfaces of a start: measured once, then taken from the file while it holds."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from hydra_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from hydra_engine.core.cost import Slowdowns
from hydra_engine.core.plans import VisionLoad
from hydra_engine.models.specs.base import ModelSpec, PreprocessSpec, ProcessorSpec
from hydra_engine.models.specs.decoder import LanguageSpec
from hydra_engine.profiler.other_load import OtherLoad
from hydra_engine.profiler.start import StepCosts, Subject, surface_for
from hydra_transformers.spec import GenericVisionSpec
from tests.profiler.fakes import SURFACE, FakeLanes, SquareVision, decodes

LANGUAGE = LanguageSpec(2, 64, 4, 2, 16, 128, 500, 1e-5, 1e4, 2048, True)
GENERIC = GenericVisionSpec(
    feature_size=64,
    preprocess=PreprocessSpec("bicubic", 1.0, (0, 0, 0), (1, 1, 1), "m"),
    processor=ProcessorSpec("d", "m", "<image>", 5, 6, False, (), 14, False, ""),
    max_tokens=64,
    max_patches=256,
    tower_parameters=1000,
)


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the machine idle, whatever runs beside the tests."""
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.0)


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return EngineConfig(
        model=str(tmp_path / "model"),
        max_model_len=2048,
        profile_dir=str(tmp_path / "profiles"),
        scheduler=SchedulerConfig(max_num_seqs=8, token_budget=128, image_budget=256),
        cache=CacheConfig(image_block_size=64),
    )


def subject(**changes: object) -> Subject:
    lanes = FakeLanes()
    spec = ModelSpec("f", "F", LANGUAGE, SquareVision(), 6, 1, 0, (2,), "bfloat16")
    made = Subject(
        lanes=lanes,
        wake=lanes.wake,
        clock=lanes.clock,
        spec=spec,
        device="cpu",
        dtype="bfloat16",
        backend="native",
        threads=2,
        num_kv_blocks=512,
        num_image_blocks=32,
        kv_token_bytes=256,
        weights_bytes=1 << 20,
        fill_cache=lambda num_blocks: None,
    )
    return replace(made, **changes)


def steps(which: Subject) -> int:
    assert isinstance(which.lanes, FakeLanes)
    return len(which.lanes.language_plans)


def found(config: EngineConfig, which: Subject, *, fresh: bool = False) -> StepCosts:
    return surface_for(config, which, lambda done, total: None, fresh=fresh, deadline_s=30.0)


def test_measured_once_and_reused_at_the_next_start(config: EngineConfig) -> None:
    first, second = subject(), subject()
    measured = found(config, first)
    again = found(config, second)
    assert steps(first) > 100 and steps(second) == 0
    assert again.surface == measured.surface and again.file == measured.file
    assert measured.source.startswith("measured just now in ") and again.source == "saved profile"
    assert "90th-percentile prediction error: language " in measured.notes[0] and "measured on 20" in again.notes[0]


def test_fresh_measures_whatever_is_saved(config: EngineConfig) -> None:
    found(config, subject())
    again = subject()
    assert found(config, again, fresh=True).source.startswith("measured") and steps(again)


def test_what_a_busy_machine_measures_replaces_nothing_that_an_idle_one_has_measured(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(share: float) -> StepCosts:
        monkeypatch.setattr(OtherLoad, "share", lambda self: share)
        return found(config, subject(), fresh=True)

    busy, idle, again = measured(0.8), measured(0.1), measured(0.9)
    assert busy.state == idle.state == "saved in" and again.profile.other_load == 0.9
    day = idle.profile.measured_at[:10]
    assert again.state == f"not saved, the machine was busy: what was measured on {day} stays in"
    assert found(config, subject()).profile.other_load == 0.1
    words = "busy, measure again: other programs took 80% of the cores meanwhile; `hydra-engine profile` measures"
    assert any(note.startswith(words) for note in busy.notes) and len(idle.notes) == len(busy.notes) - 1


def test_a_damaged_file_is_measured_anew_and_said(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    file = found(config, subject()).file
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"0.0", b"9.0", 1))
    again = subject()
    with caplog.at_level(logging.WARNING):
        found(config, again)
    assert steps(again) and "it is damaged; step times are measured again" in caplog.text
    assert found(config, subject()).source == "saved profile", "the damaged file was replaced"


def test_another_model_in_the_same_place_is_measured_anew(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    found(config, subject())
    (config.model_path / "config.json").write_text('{"changed": 1}')
    again = subject()
    found(config, again)
    assert steps(again) and "the model's files have changed" in caplog.text


def test_larger_steps_are_measured_anew_and_smaller_ones_are_not(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    found(config, subject())
    smaller = replace(config, scheduler=replace(config.scheduler, token_budget=64))
    assert found(smaller, subject()).source == "saved profile"
    larger = replace(config, scheduler=replace(config.scheduler, max_num_seqs=16))
    assert found(larger, subject()).source.startswith("measured") and "larger steps" in caplog.text


def test_another_setting_has_a_file_of_its_own(config: EngineConfig) -> None:
    one, two = found(config, subject()), found(config, subject(threads=1))
    assert one.file != two.file and one.file.exists() and two.file.exists()


@pytest.mark.slow
def test_what_changes_step_times_on_a_gpu_has_a_file_of_its_own(config: EngineConfig) -> None:
    """Graphs of every size that there may be are those of fewer rows too; sizes that were chosen are others."""
    plain: dict[str, object] = {
        "gpu": "NVIDIA H200",
        "attention": "triton",
        "sm_split": (),
        "graph_sizes": (1, 2, 4, 8),
        "captured_patches": 1024,
    }
    changes: list[dict[str, object]] = [
        {"gpu": "NVIDIA L4"},
        {"attention": "flashinfer"},
        {"sm_split": (32,)},
        {"sm_split": (32, 64)},
        {"graph_sizes": ()},
        {"captured_patches": 0},
        {"captured_tokens": 2048},
    ]
    first = found(config, subject(**plain))
    files = {found(config, subject(**plain | change)).file for change in changes}
    chosen = replace(config, cuda_graph_sizes=(1, 2, 4, 8))
    files.add(found(chosen, subject(**plain)).file)
    files.add(found(replace(config, encoder_cuda_graph_sizes=(256, 1024)), subject(**plain)).file)
    files.add(found(replace(config, deterministic=not config.deterministic), subject(**plain)).file)
    assert len(files | {first.file}) == len(changes) + 4
    fewer = found(config, subject(**plain | {"graph_sizes": (1, 2, 4)}))
    assert fewer.file == first.file and fewer.source == "saved profile"


def test_partitions_that_were_not_all_measured_are_not_used(config: EngineConfig) -> None:
    divided: dict[str, object] = {"gpu": "NVIDIA H200", "sm_split": (32, 64)}
    splits = Slowdowns(3.0, 4.0, 1.2), Slowdowns(1.4, 2.0, 2.5)

    def divided_device() -> Subject:
        lanes = FakeLanes(replace(SURFACE, splits=splits))
        return subject(lanes=lanes, wake=lanes.wake, clock=lanes.clock, **divided)

    cut = surface_for(config, divided_device(), lambda done, total: None, deadline_s=0.01)
    assert cut.surface.splits == () and any("partitions were not all measured" in note for note in cut.notes)
    whole = surface_for(config, divided_device(), lambda done, total: None, fresh=True, deadline_s=1e6)
    assert len(whole.surface.splits) == 2 and not any("partitions" in note for note in whole.notes)
    assert found(config, divided_device()).surface == whole.surface


def test_a_folder_that_cannot_be_written_is_said_and_no_reason_to_fail(
    config: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    blocked = replace(config, profile_dir=str(tmp_path / "file"))
    result = found(blocked, subject())
    assert result.source.startswith("measured") and "could not be saved" in caplog.text


def test_the_cache_is_filled_as_far_as_steps_read_it(config: EngineConfig) -> None:
    filled: list[int] = []
    which = subject(fill_cache=filled.append, num_kv_blocks=100)
    found(config, which)
    assert isinstance(which.lanes, FakeLanes)
    highest = max(int(plan.decodes.block_tables.max(initial=0)) for plan in which.lanes.language_plans)
    assert filled == [100] and highest < 100


def test_a_model_whose_pictures_cannot_be_made_up_has_estimated_vision(config: EngineConfig) -> None:
    spec = ModelSpec("f", "F", LANGUAGE, GENERIC, 6, 1, 0, (2,), "bfloat16")
    which = subject(spec=spec)
    result = found(config, which)
    assert isinstance(which.lanes, FakeLanes) and not which.lanes.vision_plans
    assert any("estimated from their FLOPs" in note for note in result.notes)
    surface = result.surface
    assert 0 < surface.vision_s(VisionLoad(64, 4096.0)) < surface.vision_s(VisionLoad(128, 8192.0))
    assert surface.vision_error == 1.0 and surface.decode_slowdown == 2.0
    assert found(config, subject(spec=spec)).source == "saved profile"


def test_a_profile_of_transformers_modules_is_not_taken_for_native_ones(config: EngineConfig) -> None:
    """Profiles of transformers modules and of native ones are not used for each other, with or without pictures."""
    native = ModelSpec("f", "F", LANGUAGE, None, 6, 1, 0, (2,), "bfloat16")
    first = found(config, subject(spec=native))
    other = found(config, subject(spec=replace(native, family="transformers")))
    again = found(config, subject(spec=native))
    assert first.source.startswith("measured") and other.source.startswith("measured")
    assert again.source == "saved profile"


def test_a_cut_is_said_and_lanes_not_seen_together_are_assumed_to_share(config: EngineConfig) -> None:
    result = surface_for(config, subject(), lambda done, total: None, deadline_s=0.01)
    assert any("were not measured within 0.01 s" in note for note in result.notes)
    assert any("half its speed" in note for note in result.notes) and result.surface.vision_slowdown == 2.0
    assert any("there was no time" in note for note in result.notes) and result.surface.vision_s(VisionLoad(1, 1.0)) > 0


def test_a_text_model_has_no_vision(config: EngineConfig) -> None:
    spec = ModelSpec("f", "F", LANGUAGE, None, None, 1, 0, (2,), "bfloat16")
    result = found(config, subject(spec=spec, num_image_blocks=0))
    assert result.surface.vision_s(VisionLoad(10, 100.0)) == 0.0
    notes = [note for note in result.notes if not note.startswith("busy")]  # which this machine may be
    assert len(notes) == 1 and notes[0].endswith(", vision n/a, both n/a")
    assert result.surface.language_s(decodes(2, 64)) > 0

"""`hydra-engine plan`: what it prints and writes, and that bad input is one sentence before anything starts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hydra_engine import profile_file
from hydra_engine.backend import devices
from hydra_engine.config import EngineConfig
from hydra_engine.core.cost import CostSurface, Curve
from hydra_engine.core.instances import EPD
from hydra_engine.errors import ConfigError
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.profiler.fit import Samples
from hydra_engine.profiler.store import Identity, Profile, Reach, model_identity, save
from hydra_planner.commands import plan as command
from hydra_planner.commands.devices import check_here, devices_of, with_mps, with_prices
from hydra_planner.search.plan import Plan
from hydra_planner.search.settings import Setting
from tests.cli.conftest import Here

SURFACE = CostSurface(
    rows=Curve((1.0, 16.0, 512.0), (0.004, 0.006, 0.08)),
    per_key_s=1e-7,
    per_pair_s=1e-8,
    per_chunk_s=1e-4,
    patches=Curve((4.0, 256.0), (0.01, 0.05)),
    per_patch_pair_s=1e-8,
)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile of the demo model on a made-up processor."""
    model = model_identity(EngineConfig().model_path)
    identity = Identity(model, "cpu", "made up", 2, 1, "balanced", "float32", "b", True, True, 16, "0")
    path = tmp_path / "profile.json"
    samples, measured = Samples((), (), ()), "2026-01-01T00:00:00Z"
    save(Profile(identity, Reach(512, 64, 512), SURFACE, samples, 1e-5, 1e-5, 1, 0, 1.0, measured), path)
    return path


@pytest.mark.slow
def test_a_plan_is_printed_explained_and_written(here: Here, profile: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    done = here(
        *("plan", "demo", "--workload", "pope", "--devices", "2", "--profile", str(profile), "--seeds", "2"),
        *("--topologies", "2EPD E+PD", "--tpot-slo", "50ms", "--explain", "--output", str(output)),
    )
    assert done.returncode == 0, done.stderr
    assert "to start    hydra-engine serve demo --topology" in done.stdout and "rho" in done.stdout
    plan = msgspec.json.decode(output.read_bytes(), type=Plan)
    assert {row.name for row in plan.rows if not row.settings} == {"2EPD", "E+PD"}
    assert plan.best.goodput and plan.points > 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "say what to plan for: --workload FILE"),
        (("--workload", "textcap"), "textcaps"),
        (("--workload", "./nothing.jsonl"), "nothing.jsonl cannot be read"),
        (("--workload", "pope", "--devices", "8xH2000"), "knows no device 'H2000'"),
        (("--workload", "pope", "--devices", "0"), "plan for 1 to 64 devices"),
        (("--workload", "pope", "--objective", "cost"), "needs --rate"),
        (("--workload", "pope", "--devices", "2xH200", "--tpot-slo", "0.01ms"), "no topology keeps the time between"),
        (("--workload", "pope", "--devices", "8xH200", "--launch"), "--launch needs 8 devices, and this machine has"),
        (("--workload", "pope", "--devices", "2xH200", "--topologies", "E+P+D"), "3 instances without a device"),
        (("--workload", "pope", "--devices", "2xH200", "--topologies", "E+D"), "no instance for stage P"),
        (("--workload", "pope", "--devices", "2xH200", "--topologies", " "), "--topologies names none"),
        (
            ("--workload", "pope", "--devices", "2xH200", "--dtype", "float32"),
            "knows bfloat16 and float16, not float32",
        ),
        (("--workload", "pope", "--devices", "2xH200", "--max-model-len", "32"), "requests of the workload have more"),
        (("--workload", "pope", "--objective", "cost", "--rate", "inf"), "needs --rate"),
        (("--workload", "pope", "--rate", "3"), "--rate is for --objective cost"),
        (("--workload", "pope", "--output", "/"), "that is a folder"),
        (("--workload", "pope", "--output", "/nowhere/plan.json"), "there is no folder /nowhere"),
        (("--workload", "pope", "--profile", "/nowhere.json"), "the profile nowhere.json cannot be read"),
        (("--workload", "pope", "--pictures", "/dev/null/plan"), "--pictures /dev/null/plan: "),
        (("--workload", "pope", "--devices", "2xH200", "--price", "H200"), "write dollars for an hour of one device"),
        (("--workload", "pope", "--devices", "2xH200", "--price", "H200=0"), "write dollars for an hour of one device"),
        (("--workload", "pope", "--devices", "2xH200", "--price", "A100=2"), "the plan has no A100-80GB, only H200"),
    ],
)
def test_bad_input_is_one_sentence(here: Here, flags: tuple[str, ...], message: str) -> None:
    done = here("plan", "demo", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and "Traceback" not in done.stderr


def test_a_load_without_requests_or_with_what_the_model_does_not_take_is_refused(here: Here, tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    video = '{"at_s":0,"prompt_tokens":4,"output_tokens":2,"videos":[[64,64,8,2.0,0]]}\n'
    for row, message in (("", "has no requests"), (video, "this model takes no videos")):
        path.write_text(f'{{"format":"hydra-engine workload","version":1}}\n{row}')
        done = here("plan", "demo", "--workload", str(path), "--devices", "2xH200")
        assert (done.returncode, done.stdout) == (2, "") and message in done.stderr


def test_a_model_without_a_tower_is_refused_pictures_and_encoders(here: Here, tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 512}
    config |= {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for flags, message in (
        (("pope",), "the workload has pictures, and the model has no vision tower"),
        (("chat", "--topologies", "E+PD"), "this model has no vision tower, so e0 would have nothing to do"),
    ):
        done = here("plan", str(tmp_path), "--load-format", "random", "--devices", "2xH200", "--workload", *flags)
        assert (done.returncode, done.stdout) == (2, "") and message in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dtype", "bfloat16"), "--dtype float32, and this plan has bfloat16"),
        (("--kv-cache-dtype", "int8"), "--kv-cache-dtype none, and this plan has int8"),
        (("--quantization", "int4"), "--quantization none, and this plan has int4"),
    ],
)
def test_a_profile_of_other_settings_is_refused(
    here: Here, profile: Path, flags: tuple[str, ...], message: str
) -> None:
    done = here("plan", "demo", "--workload", "pope", "--profile", str(profile), *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"the profile profile.json was measured with {message}" in done.stderr


def test_a_workload_with_holes_is_refused_by_its_line(here: Here, tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text('{"format":"hydra-engine workload","version":1}\n{"at_s":0,"prompt_tokens":4,"output_tokens":2}\n\n'
                    '{"at_s":1,"prompt_tokens":4,"output_tokens":2}\n')  # fmt: skip
    done = here("plan", "demo", "--workload", str(path))
    assert done.returncode != 0 and "line 3" in done.stderr


def test_a_profile_of_another_model_is_refused(profile: Path) -> None:
    config = EngineConfig(model="llava-1.5-7b", load_format="random")
    spec = load_spec(config.model_path, config.spec_options)
    with pytest.raises(ConfigError, match=r"profile\.json was measured with another model than llava-1\.5-7b"):
        devices_of("2", profile, config, spec)


def test_a_profile_of_a_busy_machine_is_refused(profile: Path, here: Here) -> None:
    read = profile_file.read(profile, Profile)
    assert read is not None
    save(msgspec.structs.replace(read, other_load=0.46), profile)
    done = here("plan", "demo", "--workload", "pope", "--profile", str(profile))
    assert (done.returncode, done.stdout) == (4, "")
    assert "no plan from profile.json, for its step times would mislead: busy, measure again: other" in done.stderr


def test_devices_are_of_several_kinds_or_like_this_machine(profile: Path) -> None:
    config = EngineConfig()
    spec = load_spec(config.model_path, config.spec_options)
    kinds, host = devices_of("2xA100 + RTX 4090", None, config, spec)
    assert [kind.name for kind in kinds.values()] == ["A100-80GB", "A100-80GB", "RTX 4090"] and host.cores
    assert all(kind.costs.source.endswith("both n/a") for kind in devices_of("1", profile, config, spec)[0].values())
    (one,), several = devices_of("1", profile, config, spec)[0].values(), devices_of("3", profile, config, spec)[0]
    assert one.on_processor and [*several] == ["cuda:0", "cuda:1", "cuda:2"]
    with pytest.raises(ConfigError, match="write --devices 8"):
        devices_of("8xH200", profile, config, spec)


def test_a_gpu_that_is_here_needs_no_datasheet(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the driver's number for its memory; without it, the plan is refused as before."""
    config, gpu = EngineConfig(), "NVIDIA GeForce RTX 5060 Ti"
    spec = load_spec(config.model_path, config.spec_options)
    read = profile_file.read(profile, Profile)
    assert read is not None
    identity = msgspec.structs.replace(read.identity, device="cuda:0", backend="cuda", gpu=gpu)
    save(msgspec.structs.replace(read, identity=identity), profile)
    with pytest.raises(ConfigError, match=f"the planner knows no device '{gpu}'"):
        devices_of("2", profile, config, spec)
    here = devices.CudaDeviceInfo(0, gpu, (12, 0), 36, 16 << 30, usable=True)
    found = devices.CudaProbe("ok", "", ("sm_80", "sm_90", "compute_90"), 13000, 13000, (here,))
    monkeypatch.setattr(devices, "probe", lambda: found)
    kinds, _ = devices_of("2", profile, config, spec)
    kind = kinds["cuda:1"]
    assert (kind.name, kind.memory_bytes, kind.on_processor) == (gpu, 16 << 30, False)
    assert (kind.link_bytes_per_s, kind.copy_bytes_per_s) == (0.8 * 31.5e9, 432e9)


def test_mps_is_for_gpus(profile: Path) -> None:
    config = EngineConfig()
    spec = load_spec(config.model_path, config.spec_options)
    assert not any(kind.time_sliced for kind in with_mps(devices_of("2xH200", None, config, spec)[0]).values())
    with pytest.raises(ConfigError, match="--mps is for GPUs"):
        with_mps(devices_of("1", profile, config, spec)[0])


def test_prices_are_those_of_the_user_where_there_are_some() -> None:
    config = EngineConfig()
    kinds, _ = devices_of("A100+RTX4090", None, config, load_spec(config.model_path, config.spec_options))
    listed, one, all_of_them = (
        [(kind.price, kind.hour_price) for kind in with_prices(kinds, texts).values()]
        for texts in ([], ["4090=$0.35"], ["2", "A100=1.29"])
    )
    assert listed == [(16000, 5.12), (3000, None)]
    assert one == [(16000, 5.12), (None, 0.35)] and all_of_them == [(None, 1.29), (None, 2.0)]


def test_the_command_to_start_has_the_flags_that_were_given_and_that_the_plan_does_not_decide() -> None:
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    arguments = parser.parse_args(
        [
            *("qwen2.5-vl-7b", "--load-format", "random", "--workload", "pope", "--tpot-slo", "40ms"),
            *("--no-prefix-caching", "--served-model-name", "my model", "--api-key", "secret", "--token-budget", "64"),
            *("--config", "c.yaml", "--limit-mm-per-prompt", '{"image": 2}', "--topology", "EPD"),
        ]
    )
    plan: Any = SimpleNamespace(best=SimpleNamespace(settings=(Setting("scheduler", "token_budget", 128),)))
    assert set(command._given_flags(arguments, plan)) == {
        *("--load-format random", "--no-prefix-caching", "--served-model-name 'my model'", "--api-key ..."),
        *("--config c.yaml", """--limit-mm-per-prompt '{"image": 2}'"""),
    }


def test_what_is_launched_is_the_winner_with_its_settings(monkeypatch: pytest.MonkeyPatch, profile: Path) -> None:
    started: list[EngineConfig] = []
    monkeypatch.setattr("hydra_engine.cli.serve.start", lambda config, server: started.append(config) or 0)
    settings = (Setting("", "instance_limits", "EPD:max_num_seqs=7"), Setting("scheduler", "token_budget", 128))
    plan = SimpleNamespace(best=SimpleNamespace(topology="2EPD@cpu", settings=settings))
    question = SimpleNamespace(config=EngineConfig())
    assert command._launch(plan, question, object()) == 0  # type: ignore[arg-type]
    assert started[0].topology == "2EPD@cpu" and started[0].scheduler.token_budget == 128
    assert started[0].for_instance("epd1", EPD).scheduler.max_num_seqs == 7
    check_here({"cpu": devices_of("1", profile, EngineConfig(), load_spec(EngineConfig().model_path))[0]["cpu"]})

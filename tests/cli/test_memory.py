"""`hydra-engine memory`: figures that follow from the model's shape, and the same refusals as at start."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydra_engine.__main__ import main
from hydra_engine.cli.memory import report_lines
from hydra_engine.config import CacheConfig, EngineConfig
from hydra_engine.core.roles import EPD
from hydra_engine.errors import ConfigError, ResourceError
from hydra_engine.instance.footprint import Footprints, footprints
from hydra_engine.models.tiny import make_tiny
from hydra_engine.specs.registry import load_spec

GIB = 1 << 30


LLAVA = "llava-1.5-7b"  # ships without weights


def found(model: Path | str, topology: str, memory_gib: float | None = 240, **cache: float) -> Footprints:
    config = EngineConfig(model=str(model), topology=topology, dtype="bfloat16", cache=CacheConfig(**cache))
    return footprints(config, None if memory_gib is None else int(memory_gib * GIB))


def test_each_role_holds_what_it_needs_and_nothing_else() -> None:
    spec = load_spec(EngineConfig(model=LLAVA).model_path)
    assert spec.vision is not None
    vision, language = 2 * spec.vision.num_parameters(), 2 * spec.language.num_parameters()
    one = {f.role: f for f in found(LLAVA, "E+P+D").instances}
    assert [(f.vision_bytes, f.language_bytes) for f in (one["E"], one["P"], one["D"])] == [
        (vision, 0),
        (0, language),
        (0, language),
    ]
    assert (one["E"].kv_bytes, one["D"].image_bytes) == (0, 0) and one["E"].image_bytes == one["P"].image_bytes > 0
    assert one["P"].kv_bytes == one["P"].kv_tokens * spec.language.kv_bytes_per_token(2)


def test_an_encoder_s_device_holds_a_twentieth() -> None:
    """As the paper has it for its models: 78 to 96 percent less for encoding, 4 to 22 for prefill."""
    result = found(LLAVA, "E+P+D", kv_cache_gib=4)
    for one, whole in zip(result.instances, result.wholes, strict=True):
        assert whole is not None and whole.role == EPD.letters
        assert whole.kv_bytes == 4 * GIB and one.total_bytes < whole.total_bytes
    encode, prefill, _ = result.instances
    assert result.wholes[0] is not None
    assert encode.weights_bytes < 0.05 * result.wholes[0].weights_bytes
    assert 0.95 < prefill.weights_bytes / result.wholes[0].weights_bytes < 1


def test_a_device_is_shared_by_its_instances_only() -> None:
    two, three = found(LLAVA, "E+PD", 60), found(LLAVA, "E+2PD", 90)
    assert [f.kv_tokens for f in two.instances] == [f.kv_tokens for f in three.instances[:2]]
    together, apart = found(LLAVA, "E@cuda:0+PD@cuda:0", 60), found(LLAVA, "E@cuda:0+PD@cuda:1", 60)
    assert (together.memory, apart.memory) == ({"cuda:0": 60 * GIB}, {"cuda:0": 60 * GIB, "cuda:1": 60 * GIB})
    # On a GPU whoever keeps KV gets what the others do not need.
    (_, beside), (_, alone) = together.instances, apart.instances
    assert 0.9 * alone.kv_bytes < beside.kv_bytes < alone.kv_bytes
    assert 0.9 * 60 * GIB - GIB < alone.total_bytes < 0.9 * 60 * GIB
    assert {f.device for f in found(LLAVA, "E@cuda:3+PD", 60).instances} == {"cuda:3"}


def test_where_everything_would_not_fit_a_role_may() -> None:
    result = found("demo", "EP+D", None)
    assert None not in result.wholes and all(f.total_bytes > 0 for f in result.instances)
    lines = report_lines(result, "demo")
    assert lines[0] == "demo (llava), bfloat16, topology EP+D" and len(lines) == 5
    assert "vision tower" in lines[3] and "vision tower" not in lines[2]


def test_an_instance_that_would_not_fit_is_named() -> None:
    with pytest.raises(ResourceError, match=r"^p0 would not fit: instance role P needs KV for \d+ tokens"):
        found(LLAVA, "E+P+D", 24)
    result = found(LLAVA, "E@cuda:0+PD@cuda:1", 15.5)
    assert result.wholes == (None, None) and "EPD would not fit" in report_lines(result, "m")[2]
    assert "too much, give smaller caches" in report_lines(found(LLAVA, "PD+E", 40, kv_cache_gib=30), "m")[-1]


def test_topologies_that_cannot_serve_the_model_are_refused(tmp_path: Path) -> None:
    make_tiny("qwen3", tmp_path, seed=0)
    for model, topology, words in (
        (LLAVA, "P+D", "no instance for stage E; write for example E+P+D or EP+D"),
        (tmp_path, "E+P+D", "no vision tower, so e0 would have nothing to do; write P[+]D"),
    ):
        with pytest.raises(ConfigError, match=words.replace("E+P+D or EP+D", r"E\+P\+D or EP\+D")):
            found(model, topology)
    lines = report_lines(found(tmp_path, "P+D"), "text")
    assert all("none" in line and "tower" not in line for line in lines[2:4])


def test_what_steps_take_of_a_gpu_is_estimated() -> None:
    result = found("qwen2-vl-7b", "E@cuda:0+PD@cuda:1", 80)
    encode, decode = (one.working for one in result.instances)
    assert 1 * GIB < encode.encode_bytes < 4 * GIB and (encode.language_bytes, decode.encode_bytes) == (0, 0)
    assert 0.1 * GIB < decode.language_bytes < GIB and decode.graph_bytes > encode.graph_bytes > 0
    lines = report_lines(result, "m")
    assert lines[4].startswith("  e0: activations about 1.8 GiB, graphs 176.0 MiB; measured at start")
    assert "activations" in lines[3] and "activations about" not in "".join(report_lines(found(LLAVA, "EPD"), "m"))
    with pytest.raises(
        ResourceError, match=r"^epd0 would not fit: .* lower --token-budget or --max-num-seqs or --image"
    ):
        footprints(EngineConfig(model="qwen2-vl-7b", device="cuda:0", dtype="bfloat16"), 16 * GIB)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", LLAVA, "--topology", "E+PD", "--memory", "60", "--dtype", "bfloat16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["instance", "role", "device", "weights"]
    assert lines[2].split()[:2] == ["e0", "E"] and "decoder 12.6 GiB" in lines[2]
    assert lines[-1].startswith("device cpu: ") and lines[-1].endswith(" of 60.0 GiB")
    for wrong in ("0", "-1", "nan"):
        assert main(["memory", LLAVA, "--memory", wrong]) == 2
        assert "--memory must be a number of GiB above 0" in capsys.readouterr().err

"""`hydra-engine memory`: figures that follow from the model's shape, and the same refusals as at start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hydra_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from hydra_engine.core.instances import EPD
from hydra_engine.core.units import size
from hydra_engine.errors import ConfigError, ResourceError
from hydra_engine.models.specs.registry import load_spec
from hydra_planner.commands.memory import report_lines
from hydra_planner.footprint import Footprints, footprints
from tests.cli.conftest import Here
from tools.miniatures import make_tiny

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
    assert [(f.plan.vision_weights_bytes, f.plan.language_weights_bytes) for f in (one["E"], one["P"], one["D"])] == [
        (vision, 0),
        (0, language),
        (0, language),
    ]
    assert (one["E"].plan.kv_bytes, one["D"].plan.image_bytes) == (0, 0) and one["E"].plan.image_bytes == one[
        "P"
    ].plan.image_bytes > 0
    assert one["P"].plan.kv_bytes == one["P"].kv_tokens * spec.language.kv_bytes_per_token(2)


def test_an_encoder_s_device_holds_a_twentieth() -> None:
    """The paper's figures for its models: 78 to 96 percent less for encoding, 4 to 22 for prefill."""
    result = found(LLAVA, "E+P+D", kv_cache_gib=4)
    for one, whole in zip(result.instances, result.wholes, strict=True):
        assert whole is not None and whole.role == EPD.letters
        assert whole.plan.kv_bytes == 4 * GIB and one.plan.total_bytes < whole.plan.total_bytes
    encode, prefill, _ = result.instances
    assert result.wholes[0] is not None
    assert encode.plan.weights_bytes < 0.05 * result.wholes[0].plan.weights_bytes
    assert 0.95 < prefill.plan.weights_bytes / result.wholes[0].plan.weights_bytes < 1


def test_a_device_is_shared_by_its_instances_only() -> None:
    two, three = found(LLAVA, "E+PD", 60), found(LLAVA, "E+2PD", 90)
    assert [f.kv_tokens for f in two.instances] == [f.kv_tokens for f in three.instances[:2]]
    together, apart = found(LLAVA, "E@cuda:0+PD@cuda:0", 60), found(LLAVA, "E@cuda:0+PD@cuda:1", 60)
    assert (together.memory, apart.memory) == ({"cuda:0": 60 * GIB}, {"cuda:0": 60 * GIB, "cuda:1": 60 * GIB})
    # On a GPU whoever keeps KV gets what the others do not need.
    (_, beside), (_, alone) = together.instances, apart.instances
    assert 0.9 * alone.plan.kv_bytes < beside.plan.kv_bytes < alone.plan.kv_bytes
    assert 0.9 * 60 * GIB - GIB < alone.plan.total_bytes < 0.9 * 60 * GIB
    assert {f.device for f in found(LLAVA, "E@cuda:3+PD", 60).instances} == {"cuda:3"}


def test_where_everything_would_not_fit_a_role_may() -> None:
    result = found("demo", "EP+D", None)
    assert None not in result.wholes and all(f.plan.total_bytes > 0 for f in result.instances)
    lines = report_lines(result, "demo")
    assert lines[0] == "demo (llava), bfloat16, topology EP+D" and len(lines) == 5
    assert "vision tower" in lines[3] and "vision tower" not in lines[2]


def test_an_instance_that_would_not_fit_is_named() -> None:
    with pytest.raises(
        ResourceError,
        match=r"^p0 would not fit .* 24: weights 12\.\d GiB > 8 GiB for .* P, its part of the 24 GiB",
    ):
        found(LLAVA, "E+P+D", 24)
    result = found(LLAVA, "E@cuda:0+PD@cuda:1", 15.5)
    assert result.wholes == (None, None) and "EPD would not fit" in report_lines(result, "m")[2]
    assert "too much, give smaller caches" in report_lines(found(LLAVA, "PD+E", 40, kv_cache_gib=30), "m")[-1]


def test_caches_that_do_not_fit_are_shown_and_end_with_the_code_of_missing_memory(here: Here) -> None:
    for gib, code in ((30, 4), (20, 0)):
        done = here("memory", "demo", "--memory", "24", "--kv-cache-gib", str(gib))
        assert (done.returncode, "too much" in done.stdout) == (code, code == 4)


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


def test_steps_of_a_mixture_count_in_host_memory() -> None:
    """Rows of a mixture are copied for each expert; other steps fit what caches leave."""
    mixture = found("qwen3-vl-30b-a3b", "EPD@cpu")
    (one,) = mixture.instances
    shown = f"  epd0: activations about {size(one.plan.working.total_bytes)}"
    assert one.plan.working.language_bytes > 100 << 20 and shown in report_lines(mixture, "m")
    assert found(LLAVA, "EPD@cpu").instances[0].plan.working.total_bytes == 0


def test_what_steps_take_of_a_gpu_is_estimated() -> None:
    result = found("qwen2-vl-7b", "E@cuda:0+PD@cuda:1", 80)
    encode, decode = (one.plan.working for one in result.instances)
    assert 1 * GIB < encode.encode_bytes < 4 * GIB and (encode.language_bytes, decode.encode_bytes) == (0, 0)
    assert 0.1 * GIB < decode.language_bytes < GIB and decode.graph_bytes > encode.graph_bytes > 0
    lines = report_lines(result, "m")
    assert lines[4].startswith("  e0: activations about 1.8 GiB, graphs 176 MiB; measured at start")
    assert "activations" in lines[3] and "activations about" not in "".join(report_lines(found(LLAVA, "EPD"), "m"))
    with pytest.raises(
        ResourceError,
        match=r"^epd0 would not fit .* 16: weights .* lower --token-budget or --max-num-seqs or --image",
    ):
        footprints(EngineConfig(model="qwen2-vl-7b", device="cuda:0", dtype="bfloat16"), 16 * GIB)


def test_where_graphs_do_not_fit_there_are_fewer() -> None:
    scheduler = SchedulerConfig(token_budget=2048, max_num_seqs=64)
    config = EngineConfig(model=LLAVA, topology="EPD@cuda:0", dtype="bfloat16", scheduler=scheduler)
    graphs = []
    for gib, tokens in ((24, 2048), (18.4, 1024), (18.25, 512), (18.2, 256), (17, 0)):
        result = footprints(config, int(gib * GIB))
        (one,) = result.instances
        graphs.append(one.plan.working.graph_bytes)
        reach = f"up to {tokens} tokens" if tokens else "none"
        said = f"graphs {size(graphs[-1])} (steps with prompts: {reach}); measured at start"
        assert report_lines(result, "m")[3].endswith(said)
        assert (one.plan.max_model_len == 4096) == (tokens > 0), "contexts are shorter only where no graph is left"
    assert graphs == sorted(graphs, reverse=True) and graphs[0] > 1.5 * graphs[-1]


QWEN = ("qwen2.5-vl-7b", "--load-format", "random", "--dtype", "bfloat16")


def refused(here: Here, *arguments: str) -> str:
    done = here("memory", *QWEN, *arguments)
    assert done.returncode == 4
    (line,) = done.stderr.splitlines()
    return line.removeprefix("hydra-engine: ")


def test_weights_that_do_not_fit_come_first(here: Here) -> None:
    told = refused(here, "--memory", "8")
    assert told == (
        "epd0 would not fit into --memory 8: weights 15.4 GiB > 8 GiB for instance role EPD; "
        "free memory or take a smaller model; it fits with --quantization int4 (weights 6.2 GiB) and "
        "--kv-cache-dtype int8"
    )
    # On a processor matrices stay as the checkpoint has them, a GPU widens them.
    assert "weights 15.4 GiB > 8 GiB" in refused(here, "--memory", "8", "--dtype", "float32")
    on_gpu = "--dtype", "float32", "--topology", "EPD@cuda:0"
    assert "weights 30.9 GiB" in (told := refused(here, "--memory", "8", *on_gpu)) and "take a smaller --dtype" in told


@pytest.mark.parametrize(
    ("given", "remedies"),
    [
        (("--memory", "12"), ["--quantization int8 (weights 8.9 GiB)", "--quantization int4 (weights 6.2 GiB)"]),
        (("--memory", "9"), ["--quantization int4 (weights 6.2 GiB)"]),
        (
            ("--memory", "7"),
            ["--quantization int4 (weights 6.2 GiB) and --kv-cache-dtype int8 and --max-model-len 2048"],
        ),
        (("--memory", "9.5", "--quantization", "int8"), ["--quantization int4 (weights 6.2 GiB)"]),
        (
            ("--memory", "11.6", "--topology", "EPD@cuda:0", "--quantization", "int4"),
            ["--enforce-eager (no graphs, 619.4 MiB; steps take longer)", "--kv-cache-dtype int8"],
        ),
        (("--memory", "6"), []),
        (
            ("--memory", "12", "--topology", "EPD@cuda:0"),
            ["--quantization int4 (weights 6.2 GiB) and --kv-cache-dtype int8"],
        ),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_makes_a_model_fit_is_named_and_makes_it_fit(
    given: tuple[str, ...], remedies: list[str], here: Here
) -> None:
    told = refused(here, *given)
    assert told.partition("; it fits with ")[2].partition(", or")[0] == " or with ".join(remedies)
    for remedy in remedies:
        words = re.sub(r" \(.*?\)| and", "", remedy).split()
        assert here("memory", *QWEN, *given, *words).returncode == 0


def test_what_steps_take_of_a_gpu_comes_with_the_weights(here: Here) -> None:
    told = refused(here, "--memory", "16.2", "--topology", "EPD@cuda:0")
    assert told.startswith(
        "epd0 would not fit into --memory 16.2: weights 15.4 GiB + working memory 2.6 GiB + margin 512 MiB > 14.6 GiB "
        "for instance role EPD; raise --gpu-memory-utilization, lower --token-budget or"
    )


def test_caches_come_last_with_the_least_that_they_need(here: Here) -> None:
    assert "567.9 MiB are left beside the weights; free memory" in (told := refused(here, "--memory", "16"))
    assert (
        ": KV cache 226.6 MiB < 896.9 MiB (16392 tokens, one largest picture" in told and "--kv-cache-gib" not in told
    )
    assert refused(here, "--memory", "18", "--max-model-len", "60000").endswith("or lower --max-model-len to 19120")


@pytest.mark.parametrize(
    "given",
    [
        ("--memory", "17.2"),
        ("--memory", "16.5"),
        ("--memory", "17", "--kv-cache-gib", "0.1"),
        ("--memory", "17", "--image-cache-gib", "0.01"),
        ("--memory", "17", "--num-kv-blocks", "3", "--num-image-blocks", "1"),
        ("--memory", "20", "--max-model-len", "60000"),
    ],
    ids=" ".join,
)
def test_who_gives_what_was_asked_for_is_not_asked_again(given: tuple[str, ...], here: Here) -> None:
    told = refused(here, *given)
    asked = re.findall(r"(--(?:kv-cache-gib|image-cache-gib|num-\w+-blocks)) (\d\S*?)(?=[ ,]|$)", told)
    assert asked, told
    assert here("memory", *QWEN, *given, *(word for pair in asked for word in pair)).returncode == 0


def test_the_document_shows_what_its_command_prints(here: Here) -> None:
    text = (Path(__file__).parents[2] / "docs" / "topologies.md").read_text(encoding="utf-8")
    found = re.search(r"```sh\nhydra-engine (memory [^\n]*)\n```.*?```\n(.*?)```", text, re.DOTALL)
    assert found and here(*found[1].split()).stdout == found[2]


def test_the_command(here: Here) -> None:
    done = here("memory", LLAVA, "--topology", "E+PD", "--memory", "60", "--dtype", "bfloat16")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[1].split()[:4] == ["instance", "role", "device", "weights"]
    assert lines[2].split()[:2] == ["e0", "E"] and "decoder 12.6 GiB" in lines[2]
    assert lines[-1].startswith("device cpu: ") and lines[-1].endswith(" of 60 GiB")
    for wrong in ("0", "-1", "nan"):
        done = here("memory", LLAVA, "--memory", wrong)
        assert done.returncode == 2 and "--memory must be a number of GiB above 0" in done.stderr

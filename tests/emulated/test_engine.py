"""Engines on an emulated device, from the choice of the device to the answers: loading, measuring, caches, warm-up,
graphs, scheduling, both lanes, aborts. The tokens are those of a processor, and lanes wait for nothing."""

from __future__ import annotations

import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hydra_engine
from hydra_engine import Engine, Grammar
from hydra_engine.cluster.supervisor import Supervisor
from hydra_engine.errors import ConfigError, ResourceError
from tests import faults
from tests.emulated import tensors
from tests.emulated.conftest import Models, assert_clean
from tests.emulated.cuda import NO_PEER_ACCESS, emulated_cuda
from tests.emulated.process import FINDINGS
from tests.emulated.streams import Streams
from tests.engine.conftest import assert_at_rest, picture
from tests.faults import set_fault
from tests.kernels.scaled_mm import scaled_mm
from tests.models.quantized.written import METHODS, write_checkpoint, write_dequantized
from tools.demo_training.scenes import held_out_questions

DEMO = Path(hydra_engine.__file__).parent / "demo" / "model"
SMALL: dict[str, Any] = {"threads": 1, "block_size": 4, "num_kv_blocks": 512, "token_budget": 24}
WORDS = Grammar("regex", "([a-f]{3} ){2,6}")
ENDLESS = {"max_tokens": 10, "ignore_eos": True}
ASKED: list[tuple[str, list[Any] | None, dict[str, Any]]] = [
    ("one text", None, {"temperature": 0}),
    ("a text that is longer than what one step computes of a prompt", None, {"temperature": 1.0, "seed": 9}),
    ("see", [picture(1)], {"temperature": 0}),
    ("look", [picture(2), picture(3, 90, 40)], {"temperature": 0.8, "seed": 4, "top_k": 12, "min_p": 0.02}),
    ("see", [picture(1)], {"temperature": 0.5, "seed": 3, "top_p": 0.9}),
    ("with logprobs", None, {"temperature": 0, "logprobs": 2}),
    ("with penalties", None, {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.7, "min_tokens": 4}),
    ("with a bias", None, {"temperature": 1.0, "seed": 6, "logit_bias": {5: 3.0}}),
    ("scored", None, {"temperature": 0, "prompt_logprobs": 1}),
    ("in a grammar", None, {"temperature": 1.0, "seed": 7, "grammar": WORDS, "ignore_eos": False}),
]
FAMILIES = (
    "llava_next",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "internvl",
    "minicpmv",
    "minicpmv4_6",
    "hybrid",
)  # besides the ordinary two
FORMS: dict[str, dict[str, Any]] = {
    "graphs": {"cuda_graph_sizes": (1, 4, 6)},
    "eager": {"enforce_eager": True},
    "deterministic": {"deterministic": True, "cuda_graph_sizes": (6,)},
    "divided": {"sm_split": "2,4", "cuda_graph_sizes": (2, 6)},
    "full": {"num_kv_blocks": 40, "cuda_graph_sizes": (6,)},
    "sliced": {"tpot_slo": 0.05, "cuda_graph_sizes": (6,)},
    "bfloat16": {"dtype": "bfloat16", "deterministic": True, "cuda_graph_sizes": (1, 6)},
}
SIXTEEN_BITS: dict[str, Any] = {"dtype": "bfloat16", "backend": "reference"}  # on a processor


def ask(engine: Engine) -> list[tuple[int, ...]]:
    handles = [engine.submit(text, pictures, **(ENDLESS | options)) for text, pictures, options in ASKED]
    return [handle.result(60).token_ids for handle in handles]


@cache
def expected(model_dir: Path, **options: Any) -> list[tuple[int, ...]]:
    with Engine(model_dir, **SMALL, **options) as engine:
        return ask(engine)


def check(streams: Streams, model_dir: Path, *, like: Path | None = None, **options: Any) -> None:
    """`like`: whose tokens they are on a processor, instead of the model's own."""
    wanted = expected(like or model_dir, **(SIXTEEN_BITS if "dtype" in options else {}))
    with Engine(model_dir, device="cuda", **(SMALL | {"max_num_seqs": 6} | options)) as engine:
        streams.serving = True
        assert ask(engine) == wanted
        gone = [engine.submit("gone " * count, [picture(8)], max_tokens=50, ignore_eos=True) for count in (1, 3)]
        time.sleep(0.02)
        for handle in gone:
            handle.cancel()
        assert ask(engine) == wanted, "with what the caches hold"
        assert_at_rest(engine)
        streams.serving = False
        said = any(note.startswith("lane priority balanced: both") for note in engine.summary.notes)
        assert said == ("tpot_slo" in options), "no lane goes first, which is said where one was to"
    assert_clean(streams)


@pytest.mark.quick("llava")
@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_tokens_are_those_of_a_processor(streams: Streams, models: Models, family: str) -> None:
    check(streams, models(family), **FORMS["graphs"])


@pytest.mark.drawn
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form"),
    [*((family, "graphs") for family in FAMILIES), *(("qwen2_5_vl", form) for form in FORMS if form != "graphs")],
)
def test_every_family_and_every_form(streams: Streams, models: Models, family: str, form: str) -> None:
    check(streams, models(family), **FORMS[form])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "form"),
    [
        ("w4-32", "graphs"),
        ("w8a8", "eager"),
        ("gptq-4-zeros", "deterministic"),
        ("fp8-compressed-channel", "graphs"),
        ("fp8-tensor", "deterministic"),
        ("fp8-128", "eager"),
    ],
)
def test_tokens_of_a_quantised_checkpoint_are_those_of_the_dequantised_one(
    streams: Streams, models: Models, tmp_path: Path, method: str, form: str
) -> None:
    check_quantised(streams, models, tmp_path, method, **FORMS[form])


def check_quantised(streams: Streams, models: Models, tmp_path: Path, method: str, **options: Any) -> None:
    """Activations are not rounded on a GPU, so a processor computes with the dequantised weights here."""
    plain, quantised, tensors = models("llava"), tmp_path / "quantised", tmp_path / "tensors"
    weights = write_checkpoint(plain, quantised, METHODS[method], nested="text_config")
    write_dequantized(plain, tensors, weights)
    check(streams, quantised, like=tensors, **options)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["graphs", "deterministic", "eager"])
def test_tokens_with_keys_and_values_of_int8_are_those_of_a_processor(
    streams: Streams, models: Models, form: str
) -> None:
    check_int8_keys(streams, models, **FORMS[form])


def check_int8_keys(streams: Streams, models: Models, **options: Any) -> None:
    """Compares with a processor's reference ops: its kernels round a key of a million otherwise."""
    model_dir, int8 = models("qwen2_5_vl"), {"kv_cache_dtype": "int8"}
    wanted = expected(model_dir, backend="reference", **int8)
    with Engine(model_dir, device="cuda", **(SMALL | {"max_num_seqs": 6} | int8 | options)) as engine:
        streams.serving = True
        assert ask(engine) == wanted
        assert ask(engine) == wanted, "with what the caches hold"
        streams.serving = False
        assert any("int8" in note for note in engine.summary.notes)
    assert_clean(streams)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), [("llava", "Q4_0"), ("qwen3_moe", "Q8_0"), ("qwen3", "F32")])
def test_a_gguf_file_starts_and_answers(
    streams: Streams, models: Models, tmp_path: Path, family: str, kind: str
) -> None:
    """Computes as the reference ops of a processor, which round no activations of quantised weights either."""
    gguf_files = pytest.importorskip("tests.gguf_files", exc_type=ImportError)
    gguf_files.write_gguf(models(family), tmp_path, kind)
    answers = []
    for device in ({"backend": "reference"}, {"device": "cuda"}):
        with Engine(tmp_path, **SMALL, **device, max_num_seqs=6, **FORMS["graphs"]) as engine:
            streams.serving = "device" in device
            handles = [engine.submit(text, **ENDLESS, temperature=0) for text in ("one text", "and another one")]
            answers.append([handle.result(60).token_ids for handle in handles])
            streams.serving = False
    assert answers[0] == answers[1] if kind == "F32" else all(answers[1])
    assert_clean(streams)


def test_flashinfer_reads_no_int8(models: Models) -> None:
    options = {"kv_cache_dtype": "int8", "attention_backend": "flashinfer"}
    with emulated_cuda(), pytest.raises(ConfigError, match="FlashInfer reads no int8"):
        Engine(models("llava"), device="cuda", threads=1, **options).close()


@pytest.mark.slow
def test_ops_of_sixteen_bits(streams: Streams, models: Models) -> None:
    """Ops without a promise of equal tokens round elsewhere, which few of the requests notice."""
    model_dir = models("qwen2_5_vl")
    wanted = expected(model_dir, **SIXTEEN_BITS)
    options = SMALL | FORMS["graphs"] | {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 6}
    with Engine(model_dir, **options) as engine:
        streams.serving = True
        found = ask(engine)
        streams.serving = False
    assert sum(one == other for one, other in zip(found, wanted, strict=True)) > len(wanted) / 2
    assert_clean(streams)


@pytest.mark.drawn
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fp8-compressed-channel", "fp8-128"])
def test_the_demo_model_in_eight_bit_floats_answers_as_in_sixteen(
    streams: Streams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Prompts are multiplied by tensor cores with rounded rows, but where a row has two or three blocks. A weight takes
    a byte; its scales, and what rows are filled up with, are a fifth of that at most in matrices so small."""
    quantised = tmp_path / "quantised"
    weights = write_checkpoint(DEMO, quantised, METHODS[method], nested="text_config")
    multiplied: list[int] = []

    def counted(rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        multiplied.append(rows.shape[0])
        return scaled_mm(rows, *args, **kwargs)

    monkeypatch.setitem(tensors._OF_DEVICES, torch.ops.aten._scaled_mm.default, counted)
    questions = held_out_questions(8, seed=2024)
    asked = [q.text for q in questions], [q.image for q in questions]
    held, answers = [], []
    for model_dir in (DEMO, quantised):
        with Engine(model_dir, **SMALL, device="cuda", dtype="bfloat16", max_num_seqs=6, enforce_eager=True) as engine:
            streams.serving = True
            answers.append([result.text for result in engine.generate(*asked, temperature=0, max_tokens=64)])
            streams.serving = False
            held.append(engine.summary.weights_bytes)
    assert_clean(streams)
    assert answers[0] == answers[1] and max(multiplied) > 16
    matrices = sum(weight.size for weight in weights.values())
    assert 0.8 * matrices < held[0] - held[1] <= matrices


@pytest.mark.slow
def test_random_weights_are_those_of_a_processor(models: Models) -> None:
    """Drawn on the device and not read; a generator of the device draws others, so here it is the host's."""
    found = []
    for device in ("cpu", "cuda"):
        with emulated_cuda() as streams:
            options = SMALL | {"device": device, "load_format": "random", "enforce_eager": True}
            with Engine(models("qwen2_5_vl"), **options) as engine:
                found.append(engine.generate("random", picture(4), temperature=0, **ENDLESS).token_ids)
            assert_clean(streams)
    assert found[0] == found[1]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("total_bytes", "given", "wanted"),
    [(1 << 32, {}, (4096, 256)), (600 << 20, {}, (2048, 64)), (1 << 32, {"token_budget": 24}, (24, 64))],
    ids=["large", "small", "given"],
)
@pytest.mark.slow
def test_limits_of_a_step_follow_from_the_memory_of_the_device(
    models: Models, total_bytes: int, given: dict[str, int], wanted: tuple[int, int]
) -> None:
    options = {"device": "cuda", "threads": 1, "enforce_eager": True, "max_model_len": 64, **given}
    with emulated_cuda(total_bytes=total_bytes), Engine(models("llava"), **options) as engine:
        (summary,) = engine.frontend.summaries
        said = [note for note in summary.notes if "from the device's memory" in note]
        assert (summary.token_budget, summary.max_num_seqs) == wanted and len(said) == 1
        assert said[0].startswith(f"{wanted[bool(given)]} ")


def test_a_device_that_is_too_small_says_so(models: Models) -> None:
    with emulated_cuda(total_bytes=1 << 19), pytest.raises(ResourceError, match="memory"):
        Engine(models("llava"), device="cuda", threads=1).close()


@pytest.mark.slow
def test_without_memory_for_a_step_requests_are_computed_alone(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.enable(monkeypatch)
    with emulated_cuda() as streams, Engine(models("llava"), device="cuda", **SMALL, **FORMS["eager"]) as engine:
        streams.serving = True
        for point in ("eng.before_step", "eng.mid_step"):
            set_fault(engine.frontend, point, "oom", "times=1")
            assert ask(engine) == expected(models("llava"))
        set_fault(engine.frontend, "vis.before_step", "raise", "times=1")
        assert ask(engine) == expected(models("llava"))
        streams.serving = False
    assert_clean(streams)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Instances are processes, each with a device of its own, and write what they find into the folder."""
    command = [sys.executable, "-m", "tests.emulated.process"]
    monkeypatch.setitem(Supervisor.__init__.__kwdefaults__, "command", command)
    monkeypatch.setenv(FINDINGS, str(tmp_path))
    return tmp_path


MOVES: dict[str, tuple[str, str, bool]] = {  # topology, transport, whether devices map each other's memory
    "three": ("E@cuda:0+P@cuda:0+D@cuda:0", "auto", True),
    "two": ("EP@cuda:0+D@cuda:0", "auto", True),
    "no access": ("E@cuda:0+P@cuda:0+D@cuda:0", "auto", False),
    "host": ("ED@cuda:0+P@cuda:0", "host", True),
    "encoder on a processor": ("E@cpu+PD@cuda:0", "auto", True),
    "decoder on a processor": ("EP@cuda:0+D@cpu", "auto", True),
    "all of it": ("E@cuda:0+P@cpu+D@cuda:0", "host", True),
}


@pytest.mark.drawn
@pytest.mark.slow
@pytest.mark.parametrize("case", MOVES)
def test_blocks_move_between_instances(
    models: Models, monkeypatch: pytest.MonkeyPatch, processes: Path, case: str
) -> None:
    topology, transport, access = MOVES[case]
    if not access:
        monkeypatch.setenv(NO_PEER_ACCESS, "1")
    options = SMALL | {"topology": topology, "max_num_seqs": 6, "cuda_graph_sizes": (1, 4, 6), "transport": transport}
    with emulated_cuda(), Engine(models("qwen2_5_vl"), **options) as engine:
        for _ in range(2):
            assert ask(engine) == expected(models("qwen2_5_vl"))
        assert_at_rest(engine)
        reports = [status.transfer for status in engine.statuses().values()]
        pulled, through_host = (sum(getattr(r, name) for r in reports) for name in ("pulled_bytes", "host_bytes"))
    found = [path.read_text(encoding="utf-8") for path in processes.iterdir()]
    assert found == [""] * len(topology.split("+"))
    # A device reads a processor's memory where it is, and the other way round nothing can.
    by_host = not access or transport == "host" or case == "decoder on a processor"
    assert pulled and through_host == (pulled if by_host else 0)


ADAPTED = ("llava", "smolvlm", "gemma3", "glm4v", "ernie4_5_vl_moe")  # the last one's experts are transformers' own


@pytest.mark.drawn
@pytest.mark.slow
@pytest.mark.parametrize("family", ADAPTED)
def test_models_through_transformers_answer_as_on_a_processor(streams: Streams, models: Models, family: str) -> None:
    """Captures nothing of them, since their modules may wait for the device."""
    options = SMALL | {"model_impl": "transformers", "deterministic": False if family.endswith("moe") else None}
    answers = []
    for device in ("cpu", "cuda"):
        with Engine(models(family), device=device, max_num_seqs=6, **options) as engine:
            streams.serving = device == "cuda"
            asked = [one for one in ASKED if len(one[1] or ()) < 2]
            handles = [engine.submit(text, pictures, **(ENDLESS | given)) for text, pictures, given in asked]
            answers.append([handle.result(60).token_ids for handle in handles])
            streams.serving = False
            assert_at_rest(engine)
            assert not engine.summary.num_graphs and not any("graphs:" in note for note in engine.summary.notes)
    assert answers[0] == answers[1]
    assert not [found for found in streams.findings if "waits for the device" not in found.what]

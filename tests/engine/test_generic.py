"""Models through transformers in the real engine: the processor's child, the stages, and what is refused when."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import transformers
from safetensors.torch import save_file

from hydra_engine import Engine
from hydra_engine.errors import CheckpointError, ContextLengthExceeded, InvalidRequest
from hydra_transformers.classes import load_config, model_class
from hydra_transformers.processor import load_processor
from tests.engine.conftest import EngineFactory, assert_at_rest, picture
from tests.support_table import record
from tools.miniatures import make_tiny
from tools.miniatures.llava_siglip import longrope

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
FAMILIES = ("smolvlm", "gemma3", "llava", "idefics3", "llava_phi3", "glm_ocr", "paddleocr_vl")
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
CASES: list[tuple[str, list[tuple[int, int]]]] = [
    ("What is this?", []),
    ("One picture.", [(64, 40)]),
    ("\nTwo of them: compare.", [(30, 90), (64, 64)]),
    ("x", [(300, 4)]),
]


@pytest.fixture(autouse=True)
def row(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Records a result for the table of docs/models.md."""
    record(request.node.name, "generic", record_property)


class WhenAsked(dict[str, T]):
    """Engines by family, made at their first use: each takes seconds."""

    def __init__(self, make: Callable[[str], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, family: str) -> T:
        return self.setdefault(family, self._make(family))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("generic")

    def make(family: str) -> Path:
        make_tiny(family, root / family, seed=5)
        return root / family

    return WhenAsked(make)


def pictures_of(sizes: list[tuple[int, int]]) -> list[Any]:
    return [picture(index, *size) for index, size in enumerate(sizes)]


def asked(engine: Engine, prompt: str, sizes: list[tuple[int, int]]) -> Any:
    return engine.submit(prompt, pictures_of(sizes) or None, **OPTIONS)


@pytest.fixture(scope="module")
def transformers_says(models: Mapping[str, Path]) -> Mapping[str, list[tuple[int, list[int]]]]:
    """The length of the prompt and the greedy tokens of every case of a family, computed when first asked for."""
    return WhenAsked(lambda family: reference(models[family]))


def reference(directory: Path) -> list[tuple[int, list[int]]]:
    config = load_config(directory, trust_remote_code=False)
    processor = load_processor(directory, config.model_type, trust_remote_code=False)
    model = model_class(config, directory, trust_remote_code=False).from_pretrained(directory, dtype=torch.float32)
    return [one_reference(processor, model, *case) for case in CASES]


def one_reference(processor: Any, model: Any, prompt: str, sizes: list[tuple[int, int]]) -> tuple[int, list[int]]:
    content = [{"type": "image"}] * len(sizes) + [{"type": "text", "text": prompt}]
    messages = [{"role": "user", "content": content}]
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    pictures = pictures_of(sizes) or None
    inputs = processor(images=pictures and [pictures], text=[text], add_special_tokens=False, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**inputs, do_sample=False, max_new_tokens=24, min_new_tokens=24, eos_token_id=None)
    length = inputs["input_ids"].shape[1]
    return length, output[0, length:].tolist()


@pytest.fixture(scope="module")
def engines(models: Mapping[str, Path]) -> Iterator[Mapping[str, Engine]]:
    """Engines of the families with the defaults of engine tests; checked to be at rest at the end."""
    options: dict[str, Any] = {"threads": 1, "block_size": 4, "num_kv_blocks": 512, "token_budget": 64}
    with contextlib.ExitStack() as stack:
        yield WhenAsked(
            lambda family: stack.enter_context(Engine(models[family], model_impl="transformers", **options))
        )


@pytest.fixture(autouse=True)
def at_rest(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engines" in request.fixturenames:
        for engine in request.getfixturevalue("engines").values():
            assert_at_rest(engine)


def check_all(engine: Engine, expected: list[tuple[int, list[int]]]) -> None:
    """Runs all cases at once."""
    assert engine.summary.family == "transformers" and engine.summary.deterministic
    results = [handle.result(60) for handle in [asked(engine, *case) for case in CASES]]
    for case, result, (length, tokens) in zip(CASES, results, expected, strict=True):
        assert list(result.token_ids) == tokens, case
        assert result.usage.prompt_tokens == length, case
        assert result.usage.num_images == len(case[1])


# LLaVA has a native implementation besides.
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers(
    engines: Mapping[str, Engine], transformers_says: Mapping[str, list[tuple[int, list[int]]]], family: str
) -> None:
    check_all(engines[family], transformers_says[family])


@pytest.mark.slow
def test_budgets_smaller_than_a_picture_change_nothing(
    make_engine: EngineFactory,
    models: Mapping[str, Path],
    transformers_says: Mapping[str, list[tuple[int, list[int]]]],
) -> None:
    """Rows of one of the models see each other, so no chunk may end among them."""
    engine = make_engine(model=models["gemma3"], model_impl="transformers", token_budget=9, image_budget=1)
    check_all(engine, transformers_says["gemma3"])


@pytest.mark.slow
def test_the_frontend_runs_no_torch_and_leaves_no_process(models: Mapping[str, Path]) -> None:
    code = f"""
        import os, sys
        from PIL import Image
        from hydra_engine import Engine
        engine = Engine({str(models["gemma3"])!r}, model_impl="transformers", processes=True, threads=1)
        processor = engine.frontend.preprocessor._loader._processor
        first = engine.generate("Hello", Image.new("RGB", (30, 40), "teal"), **{OPTIONS!r})
        pids = [*processor._host.pids(), engine.instances()[0].pid, engine.frontend._preloaded._process.pid]
        parents = {{int(open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[1]) for pid in pids[:-1]}}
        assert parents == {{pids[-1]}}, "torch and transformers are imported once"
        assert len(engine.frontend._preloaded._inherited) == 1, "the model is described once"
        engine.close()
        print("torch" in sys.modules, len(first.token_ids), *pids)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    has_torch, num_tokens, *pids = done.stdout.split()
    assert (has_torch, num_tokens) == ("False", "24")
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_the_end_of_what_is_forked_is_that_of_an_instance(
    make_engine: EngineFactory, models: Mapping[str, Path]
) -> None:
    """A successor of the instance, and of the processor's child, starts in full."""
    options: dict[str, Any] = {"processes": True, "recovery_s": 120.0}  # a start in full may take long
    engine = make_engine(model=models["gemma3"], model_impl="transformers", **options)
    expected = engine.generate("Hello", picture(1), **OPTIONS)
    preloaded, instance = engine.frontend._preloaded, engine.instances()[0].pid
    assert preloaded is not None
    preloaded._process.kill()
    assert engine.generate("Hello", picture(1), **OPTIONS).token_ids == expected.token_ids
    assert engine.generate("Hello", picture(2), **OPTIONS).token_ids
    assert engine.instances()[0].pid not in (None, instance)


@pytest.mark.slow
def test_a_picture_comes_as_a_file_too_and_is_encoded_once(engines: Mapping[str, Engine]) -> None:
    engine = engines["smolvlm"]
    image = picture(1, 50, 70)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    expected = engine.generate("What?", image, **OPTIONS)
    again = [engine.generate("What?", buffer.getvalue(), **OPTIONS) for _ in range(2)]
    assert [result.token_ids for result in again] == [expected.token_ids] * 2
    assert [result.usage.cached_images for result in again] == [0, 1]


@pytest.mark.slow
def test_a_request_beside_a_longer_one_is_answered_as_alone_where_longrope_begins(
    make_engine: EngineFactory, tmp_path: Path
) -> None:
    make_tiny("phi3", tmp_path / "phi3", seed=3, text=longrope(64))
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    short, long = [1, *range(7, 37)], [1, *(7 + i * 53 % 200 for i in range(55))]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "phi3", dtype=torch.float32).eval()
    expected = list(short)
    with torch.inference_mode():
        for _ in range(8):
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
    engine = make_engine(model=tmp_path / "phi3", model_impl="transformers", prefix_caching=False, token_budget=24)
    assert engine.summary.deterministic
    assert any(note.startswith("the context ends at 64 of the model's 512 tokens") for note in engine.summary.notes)
    handles = [engine.submit(prompt, **options) for prompt in (long, short)]
    assert list(handles[1].result(60).token_ids) == expected[len(short) :] and handles[0].result(60)
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 64 tokens"):
        engine.generate([1, *range(7, 90)], **options)


@pytest.mark.slow
def test_pictures_that_change_beside_others_come_one_a_request(
    engines: Mapping[str, Engine], transformers_says: Mapping[str, list[tuple[int, list[int]]]]
) -> None:
    engine, expected = engines["llava_onevision"], transformers_says["llava_onevision"]
    assert any(note.startswith("one picture a request: ") for note in engine.summary.notes)
    for case, (length, tokens) in zip(CASES, expected, strict=True):
        if len(case[1]) < 2:
            result = asked(engine, *case).result(60)
            assert (result.usage.prompt_tokens, list(result.token_ids)) == (length, tokens), case
        else:
            with pytest.raises(InvalidRequest, match="the request has 2 images; at most 1 is allowed: the model's"):
                asked(engine, *case).result(60)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_processor_that_is_killed_or_stopped_costs_no_picture(
    engines: Mapping[str, Engine], sent: signal.Signals
) -> None:
    engine = engines["gemma3"]
    processor = engine.frontend.preprocessor._loader._processor
    assert processor is not None
    pids = processor._host.pids()
    for pid in pids:
        os.kill(pid, sent)
    assert len(engine.generate("What?", picture(90 + sent), **OPTIONS).token_ids) == 24
    assert sorted(processor._host.pids()) != sorted(pids)


@pytest.mark.slow
def test_placeholders_that_do_not_match_name_both_counts(engines: Mapping[str, Engine]) -> None:
    engine = engines["gemma3"]
    with pytest.raises(InvalidRequest, match="the prompt has 2 image placeholders but 1 images were given"):
        engine.generate("<start_of_image> and <start_of_image>", picture(1), raw=True, **OPTIONS)
    for prompt, pictures in (
        ("<start_of_image> or <image_soft_token>", picture(1)),
        ("a <image_soft_token>", None),  # without a picture it would be a feature of nothing
    ):
        with pytest.raises(InvalidRequest, match="the prompt holds the model's image token <image_soft_token>"):
            engine.generate(prompt, pictures, raw=True, **OPTIONS)
    quoting = engine.generate("a <start_of_image> <image_soft_token>", picture(1), **OPTIONS)  # in a message it is text
    assert quoting.usage.image_tokens == engine.generate("a", picture(1), **OPTIONS).usage.image_tokens
    ids = engine.frontend.preprocessor.tokenizer.encode("<s>a<start_of_image>", add_special_tokens=False)
    written = engine.generate("<s>a<start_of_image>", picture(1), raw=True, **OPTIONS)
    assert engine.generate(ids, picture(1), **OPTIONS).token_ids == written.token_ids


def test_an_unknown_architecture_lists_the_known_ones_and_offers_the_adapter(models: Mapping[str, Path]) -> None:
    with pytest.raises(CheckpointError) as caught:
        Engine(models["gemma3"])
    words = caught.value.message
    assert "'Gemma3ForConditionalGeneration' has no native implementation" in words
    assert "model types with one are llava, " in words and 'model_impl="transformers" runs' in words


CONFIGURATION = """
import os, pathlib
from transformers import LlavaConfig
if os.environ.get("HOMEMADE_MARK"):
    pathlib.Path(os.environ["HOMEMADE_MARK"]).touch()
class HomemadeConfig(LlavaConfig):
    model_type = "homemade"
"""
MODELING = """
from transformers import LlavaForConditionalGeneration
from .configuration_homemade import HomemadeConfig
class HomemadeForConditionalGeneration(LlavaForConditionalGeneration):
    config_class = HomemadeConfig
"""


@pytest.fixture
def homemade(models: Mapping[str, Path], tmp_path: Path) -> Path:
    """A model whose code comes with it, its weights under the names that they have in memory."""
    directory = tmp_path / "homemade"
    directory.mkdir()
    for file in models["llava"].iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    model = transformers.LlavaForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    save_file(model.state_dict(), directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["model_type"], config["architectures"] = "homemade", ["HomemadeForConditionalGeneration"]
    config["auto_map"] = {
        "AutoConfig": "configuration_homemade.HomemadeConfig",
        "AutoModelForImageTextToText": "modeling_homemade.HomemadeForConditionalGeneration",
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "configuration_homemade.py").write_text(CONFIGURATION)
    (directory / "modeling_homemade.py").write_text(MODELING)
    return directory


def test_code_that_comes_with_a_model_is_refused_and_never_run(
    homemade: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOMEMADE_MARK", str(tmp_path / "mark"))
    with pytest.raises(CheckpointError, match="trust_remote_code=True the code that comes with the model"):
        Engine(homemade)
    with pytest.raises(CheckpointError, match="never run unless you give trust_remote_code=True"):
        Engine(homemade, model_impl="transformers")
    assert not (tmp_path / "mark").exists()


@pytest.mark.slow
def test_code_that_comes_with_a_model_runs_when_it_is_trusted(
    homemade: Path,
    tmp_path: Path,
    transformers_says: Mapping[str, list[tuple[int, list[int]]]],
) -> None:
    prompt, sizes = CASES[1]
    code = f"""
        from hydra_engine import Engine
        from tests.engine.test_generic import OPTIONS, pictures_of
        with Engine({str(homemade)!r}, model_impl="transformers", trust_remote_code=True, threads=1) as engine:
            print(*engine.generate({prompt!r}, pictures_of({sizes!r}), **OPTIONS).token_ids)
    """
    mark = {"HOMEMADE_MARK": str(tmp_path / "mark"), "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | mark | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mark").exists()
    assert list(map(int, done.stdout.split())) == transformers_says["llava"][1][1]

"""Specs from config files: both generations of layouts, defaults that files leave out, and every refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.errors import CheckpointError, InvalidImage
from hydra_engine.models.llava.spec import LlavaVisionSpec
from hydra_engine.models.llava_next.original_spec import ANYRES
from hydra_engine.models.specs.base import ModelSpec, View
from hydra_engine.models.specs.registry import FAMILIES, load_spec
from tests.models.specs.model_dirs import changed

Json = dict[str, Any]

# As llava-1.5-7b-hf was published: whatever equals transformers' defaults is left out of the nested configs.
PUBLISHED: Json = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vocab_size": 32064,
}
GENERATION: Json = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 32001}
IMAGES: Json = {
    "crop_size": {"height": 336, "width": 336},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "CLIPImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"shortest_edge": 336},
}
LLAMA: Json = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rope_theta": 50000.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "torch_dtype": "bfloat16",
}


class Directory:
    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, content: Any) -> None:
        (self.path / name).write_text(content if isinstance(content, str) else json.dumps(content))

    def spec(self, config: Json | None = None) -> ModelSpec:
        if config is not None:
            self.write("config.json", config)
        return load_spec(self.path)

    def vision(self, config: Json | None = None) -> LlavaVisionSpec:
        vision = self.spec(config).vision
        assert isinstance(vision, LlavaVisionSpec)
        return vision

    def refusal(self, config: Json | None = None) -> str:
        with pytest.raises(CheckpointError) as caught:
            self.spec(config)
        message = caught.value.message
        assert "\n" not in message and str(self.path.parent) not in message and len(message) < 600
        return message


@pytest.fixture
def published(tmp_path: Path) -> Directory:
    directory = Directory(tmp_path)
    for name, content in (
        ("config.json", PUBLISHED),
        ("generation_config.json", GENERATION),
        ("preprocessor_config.json", IMAGES),
        ("processor_config.json", {"processor_class": "LlavaProcessor", "patch_size": 14}),
    ):
        directory.write(name, content)
    return directory


def test_a_published_checkpoint(published: Directory) -> None:
    spec = published.spec()
    language = spec.language
    assert (spec.family, spec.dtype, spec.max_model_len) == ("llava", "float16", 4096)
    assert (spec.image_token_id, spec.bos_token_id, spec.pad_token_id, spec.eos_token_ids) == (32000, 1, 32001, (2,))
    assert (language.hidden_size, language.num_layers, language.num_heads, language.num_kv_heads) == (4096, 32, 32, 32)
    assert (language.head_dim, language.intermediate_size, language.rope_theta) == (128, 11008, 10000.0)
    assert not language.tie_embeddings and not language.attention_bias
    assert language.num_parameters() == 6_738_415_616 + 2 * 64 * 4096  # Llama 2 7B with 64 more words
    vision = published.vision()
    plan, tower = vision.plan_image(500, 20), vision.tower
    assert plan.items == ((336, 336, 1, 576, 576, (1, 24, 24), 0, 0, 0, False, False),)
    assert plan.views == (View((8400, 336), (336, 336), (-4032, 0), (336, 336)),)
    assert (tower.num_layers, tower.feature_layers, tower.num_active_layers) == (24, (23,), 23)
    assert vision.shortest_edge == 336
    assert (vision.preprocess.resample, vision.preprocess.rescale) == ("bicubic", 1 / 255)
    assert (tower.hidden_act, vision.projector_act, tower.norm_eps) == ("quick_gelu", "gelu", 1e-5)
    assert vision.feature_size == 4096 and vision.projector_bias and vision.num_planes == 1


def test_the_shipped_model() -> None:
    spec = load_spec(Path(__file__).parents[3] / "hydra_engine" / "demo" / "model")
    assert spec.family == "llava" and spec.vision is not None
    assert spec.vision.plan_image(84, 84).num_tokens == 9


def test_new_and_old_image_processor_layouts_agree(published: Directory) -> None:
    expected = published.vision().preprocess
    (published.path / "preprocessor_config.json").unlink()
    published.write("processor_config.json", {"processor_class": "LlavaProcessor", "image_processor": IMAGES})
    assert published.vision().preprocess == expected
    (published.path / "processor_config.json").unlink()
    published.write("preprocessor_config.json", {**IMAGES, "size": 336, "crop_size": 336})
    assert published.vision().preprocess == expected
    published.write("preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor"})
    assert published.vision().preprocess == expected


def test_an_exact_size_needs_no_crop(published: Directory) -> None:
    size = {"height": 336, "width": 336}
    published.write("preprocessor_config.json", {**IMAGES, "size": size, "do_center_crop": False})
    assert published.vision().shortest_edge == 0
    published.write("preprocessor_config.json", {**IMAGES, "do_rescale": False, "do_normalize": False})
    preprocess = published.vision().preprocess
    assert (preprocess.rescale, preprocess.mean, preprocess.std) == (1.0, (0, 0, 0), (1, 1, 1))


def test_identity_changes_with_the_pixels(published: Directory) -> None:
    identities = {published.vision().preprocess.identity}
    for change in ({"resample": 2}, {"size": {"shortest_edge": 400}}):
        published.write("preprocessor_config.json", {**IMAGES, **change})
        identities.add(published.vision().preprocess.identity)
    assert len(identities) == 3


@pytest.mark.parametrize(
    ("layer", "expected"), [(-1, (24,)), (-2, (23,)), (0, (0,)), (24, (24,)), ([-2, -5, 8], (23, 20, 8))]
)
def test_feature_layers(published: Directory, layer: Any, expected: tuple[int, ...]) -> None:
    assert published.vision(changed(PUBLISHED, "vision_feature_layer", layer)).tower.feature_layers == expected


def test_the_class_token_is_one_more_token(published: Directory) -> None:
    vision = published.vision(changed(PUBLISHED, "vision_feature_select_strategy", "full"))
    plan = vision.plan_image(1, 1)
    assert (plan.num_patches, plan.num_tokens) == (576, 577)
    with pytest.raises(InvalidImage):
        vision.plan_image(0, 5)


def test_old_and_new_rotary_settings_agree(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    old = directory.spec({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}).language
    new_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0}
    new = directory.spec({**changed(LLAMA, "rope_theta", ...), "rope_parameters": new_parameters}).language
    assert old == new and old.rope_theta == 50000.0
    plain = directory.spec({**LLAMA, "rope_scaling": None}).language
    assert plain.rope_parameters == {"rope_type": "default", "rope_theta": 50000.0}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = directory.spec({**LLAMA, "rope_scaling": llama3}).language
    assert scaled.rope_parameters["original_max_position_embeddings"] == 128


def test_text_only_checkpoints(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    spec = directory.spec(LLAMA)
    assert (spec.family, spec.vision, spec.image_token_id, spec.eos_token_ids) == ("llama", None, None, (2, 3))
    assert spec.language.head_dim == 16 and spec.language.num_kv_heads == 4
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 2}
    assert directory.spec(qwen).language.attention_bias
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 2}
    assert directory.spec({**mistral, "sliding_window": 32}).max_model_len == 32
    assert directory.spec({**mistral, "sliding_window": None}).max_model_len == 128
    assert directory.spec(changed(LLAMA, "architectures", ...)).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(("top", "nested"), [(True, False), (False, True), (True, True)])
def test_tied_embeddings_at_either_level(published: Directory, top: bool, nested: bool) -> None:
    config = changed(changed(PUBLISHED, "tie_word_embeddings", top), "text_config.tie_word_embeddings", nested)
    assert published.spec(config).language.tie_embeddings


def test_where_special_tokens_come_from(published: Directory) -> None:
    published.write("generation_config.json", {"eos_token_id": [7, 8]})
    assert published.spec().eos_token_ids == (7, 8)
    (published.path / "generation_config.json").unlink()
    assert published.spec(changed(PUBLISHED, "eos_token_id", 9)).eos_token_ids == (9,)
    assert published.spec(changed(PUBLISHED, "text_config.eos_token_id", 10)).eos_token_ids == (10,)
    assert published.spec(PUBLISHED).eos_token_ids == (2,)  # what transformers assumes for llama
    assert published.spec(changed(PUBLISHED, "text_config.eos_token_id", None)).eos_token_ids == ()


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_minus_one_is_no_token(published: Directory, file: str) -> None:
    """transformers generates so too; another file's value does not take its place."""
    content = GENERATION if file == "generation_config.json" else PUBLISHED
    if file == "config.json":
        (published.path / "generation_config.json").unlink()

    def spec(**ids: Any) -> ModelSpec:
        published.write(file, {**content, **ids})
        return published.spec()

    assert spec(pad_token_id=-1).pad_token_id is None
    assert spec(bos_token_id=-1).bos_token_id is None
    assert spec(eos_token_id=-1).eos_token_ids == ()
    assert spec(eos_token_id=[-1]).eos_token_ids == ()
    assert spec(eos_token_id=[7, -1, 8, 7]).eos_token_ids == (7, 8)
    assert spec(eos_token_id=None).eos_token_ids == (2,)  # says nothing: that of the decoder's type
    published.write(file, {**content, "eos_token_id": -2})
    assert published.refusal() == (
        f"eos_token_id in {file} must be a token id, a list of token ids, or -1 for none, not '-2'"
    )


@pytest.mark.parametrize("layout", ["rope_theta", "rope_scaling", "rope_parameters"])
def test_numbers_that_are_no_sizes_may_be_large(tmp_path: Path, layout: str) -> None:
    """The base of Llama-3-8B-Instruct-Gradient-1048k."""
    base: Any = 3580165449.0
    value = base if layout == "rope_theta" else {"rope_type": "default", "rope_theta": base}
    directory = Directory(tmp_path)
    assert directory.spec({**changed(LLAMA, "rope_theta", ...), layout: value}).language.rope_theta == base
    for wrong in (1e39, float("inf"), 10**400, 0):
        message = directory.refusal({**LLAMA, "rope_theta": wrong})
        assert message.startswith("rope_theta in config.json must be a number above 0 and up to 1e+38, not '")
    assert "vocab_size in config.json must be a whole number from 1 to 2147483648" in directory.refusal(
        {**LLAMA, "vocab_size": 2**31 + 1}
    )


def test_an_image_token_that_no_file_names_is_the_class_s(published: Directory) -> None:
    assert published.spec(changed(PUBLISHED, "image_token_index", ...)).image_token_id == 32000


def test_a_text_part_without_a_type_is_of_the_family_s_type(published: Directory) -> None:
    assert (
        published.spec(changed(PUBLISHED, "text_config.model_type", ...)).language == published.spec(PUBLISHED).language
    )


ADAPTER = "; --model-impl transformers runs what transformers can load"
REFUSED: dict[str, tuple[str, Any, str]] = {
    "architecture": (
        "architectures",
        ["MambaForCausalLM"],
        "'MambaForCausalLM' has no native implementation; model types with one are llava, ",
    ),
    "no architecture": ("architectures", [], "names no architecture"),
    "text type": ("text_config.model_type", "gemma", "'gemma' is not supported; supported are llama, mistral, qwen2"),
    "text type's hint": ("text_config.model_type", "phi3", f"qwen3_vl_text{ADAPTER}"),
    "tower type": ("vision_config.model_type", "siglip_vision_model", f"supported is clip_vision_model{ADAPTER}"),
    "no text": ("text_config", ..., "config.json has no field text_config"),
    "no tower": ("vision_config", ..., "config.json has no field vision_config"),
    "no image token": ("image_token_index", -1, "image_token_index in config.json must be a whole number from 0"),
    "section of another kind": ("text_config", "llama", "text_config in config.json must be an object"),
    "number of another kind": ("text_config.vocab_size", "many", "vocab_size in text_config of config.json must be"),
    "negative number": ("vision_config.hidden_size", -3, "hidden_size in vision_config of config.json must be"),
    "heads": ("vision_config.num_attention_heads", 7, "not a multiple"),
    "shared heads": ("text_config.num_key_value_heads", 5, "cannot share"),
    "odd head": ("text_config.head_dim", 33, "head_dim 33 is odd"),
    "large head": ("text_config.head_dim", 1 << 16, "head_dim 65536 is larger than 2048"),
    "large hidden size": ("text_config.hidden_size", 1 << 17, "head_dim 4096 is larger than 2048"),
    "biases": ("text_config.mlp_bias", True, f"biases in their linear layers are not supported{ADAPTER}"),
    "activation": ("text_config.hidden_act", "relu9", f"not 'relu9'{ADAPTER}"),
    "rope type": (
        "text_config.rope_scaling",
        {"type": "longrope", "factor": 2},
        f"'longrope' is not supported; supported are default, linear, llama3, yarn, dynamic{ADAPTER}",
    ),
    "rope field": ("text_config.rope_scaling", {"type": "linear"}, "rope_scaling of text_config of config.json has no"),
    "partial rotary": ("text_config.partial_rotary_factor", 0.5, f"other than 1 is not supported{ADAPTER}"),
    "strategy": ("vision_feature_select_strategy", "half", "vision_feature_select_strategy in config.json must be"),
    "feature layer": ("vision_feature_layer", -26, "vision_feature_layer in config.json must be"),
    "no feature layer": ("vision_feature_layer", [], "vision_feature_layer in config.json must be"),
    "dtype": ("torch_dtype", "int4", "dtype 'int4' is not supported"),
    "token id": ("pad_token_id", 1.5, "pad_token_id"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_in_a_sentence(published: Directory, case: str) -> None:
    path, value, words = REFUSED[case]
    if case == "token id":
        (published.path / "generation_config.json").unlink()
    assert words in published.refusal(changed(PUBLISHED, path, value))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"crop_size": {"height": 224, "width": 224}}, "224 x 224 pixels, the tower takes 336 x 336"),
        ({"crop_size": {"height": 336}}, "has no field width"),
        ({"do_pad": True}, f"do_pad in preprocessor_config.json is not supported{ADAPTER}"),
        ({"do_resize": False}, f"do_resize false in preprocessor_config.json is not supported{ADAPTER}"),
        ({"do_center_crop": False}, "do_center_crop"),
        ({"resample": 9}, "resample"),
        ({"image_std": [1, 0, 1]}, "image_std"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"size": {"height": 300, "width": 300}}, "crop_size"),
    ],
)
def test_image_processors_that_cannot_be_followed_are_refused(published: Directory, change: Json, words: str) -> None:
    published.write("preprocessor_config.json", {**IMAGES, **change})
    assert words in published.refusal()


def test_code_that_comes_with_a_model_is_never_run(published: Directory) -> None:
    remote = {**PUBLISHED, "auto_map": {"AutoConfig": "evil.Config"}}
    (published.path / "evil.py").write_text("raise SystemExit")
    assert published.spec(remote).family == "llava"
    message = published.refusal({**remote, "architectures": ["EvilForCausalLM"]})
    assert message.endswith("never run otherwise") and all(name in message for name in FAMILIES if name != ANYRES)


def test_files_that_cannot_be_read_are_refused(published: Directory) -> None:
    path = published.path / "config.json"
    for content, words in (
        ('{"a": 1,\n"b" 2}', "not valid JSON: Expecting ':' delimiter in line 2"),
        ("[1, 2]", "must hold a JSON object"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("", "not valid JSON"),
    ):
        path.write_text(content)
        assert words in published.refusal()
    path.write_bytes(b"\xff\xfe{}\x00")
    assert "not valid JSON" in published.refusal()
    path.unlink()
    assert published.refusal() == "the model directory has no config.json"
    path.mkdir()
    assert published.refusal().startswith("config.json cannot be read")
    with pytest.raises(CheckpointError, match=r"no model directory '/.+/nowhere'"):
        load_spec(published.path / "nowhere")


def test_a_checkpoint_without_image_processor_is_refused(published: Directory) -> None:
    (published.path / "preprocessor_config.json").unlink()
    assert "neither processor_config.json nor preprocessor_config.json" in published.refusal()


def leaves(config: Json, prefix: str = "") -> Iterator[str]:
    for name, value in config.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")


ODD_VALUES = (None, ..., True, -1, 0, 1, 1.5, 10**400, float("nan"), float("inf"), "", "x", [], [[]], {}, {"a": None})


@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json", "generation_config.json"])
def test_no_value_anywhere_leads_to_another_exception(published: Directory, file: str) -> None:
    config: Json = json.loads((published.path / file).read_text())
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if file == "config.json":
        config["text_config"]["rope_parameters"] = rope
    load: Callable[[], object] = published.spec
    for path in leaves(config):
        for value in ODD_VALUES:
            published.write(file, changed(config, path, value))
            try:
                load()
            except CheckpointError as error:
                assert "\n" not in error.message
    published.write(file, config)
    load()


def test_loading_a_spec_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from pathlib import Path; from hydra_engine.models.specs.registry import load_spec;"
        "load_spec(Path('hydra_engine/demo/model'));"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

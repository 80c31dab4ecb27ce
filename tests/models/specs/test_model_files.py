"""GGUF files that a MODEL names, and the errors where it names none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.config import EngineConfig
from hydra_engine.errors import CheckpointError, ConfigError
from hydra_engine.models.loading.open_checkpoint import open_checkpoint
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.preprocess.model_files import check_tower, find_model_files
from tests.models.specs.test_gguf_file import (
    ARRAY,
    BOOL,
    F32,
    FLOAT32,
    INT32,
    STRING,
    UINT32,
    Setting,
    Tensor,
    gguf_bytes,
)

TOKENS = ["<unk>", "<s>", "</s>", "<image>", "a", "b", "ab", "<|im_end|>"]
TEXT: dict[str, tuple[int, Any]] = {
    "general.architecture": (STRING, "llama"),
    "llama.block_count": (UINT32, 1),
    "llama.context_length": (UINT32, 64),
    "llama.embedding_length": (UINT32, 8),
    "llama.feed_forward_length": (UINT32, 16),
    "llama.attention.head_count": (UINT32, 2),
    "llama.attention.head_count_kv": (UINT32, 1),
    "llama.attention.layer_norm_rms_epsilon": (FLOAT32, 1e-5),
    "tokenizer.ggml.model": (STRING, "gpt2"),
    "tokenizer.ggml.pre": (STRING, "gpt-2"),
    "tokenizer.ggml.tokens": (ARRAY, (STRING, TOKENS)),
    "tokenizer.ggml.token_type": (ARRAY, (INT32, [2, 3, 3, 3, 1, 1, 1, 3])),
    "tokenizer.ggml.merges": (ARRAY, (STRING, ["a b"])),
    "tokenizer.ggml.bos_token_id": (UINT32, 1),
    "tokenizer.ggml.eos_token_id": (UINT32, 2),
}
TOWER: dict[str, tuple[int, Any]] = {
    "general.architecture": (STRING, "clip"),
    "clip.projector_type": (STRING, "mlp"),
    "clip.vision.image_size": (UINT32, 28),
    "clip.vision.patch_size": (UINT32, 7),
    "clip.vision.embedding_length": (UINT32, 8),
    "clip.vision.block_count": (UINT32, 2),
    "clip.vision.attention.head_count": (UINT32, 2),
    "clip.vision.image_mean": (ARRAY, (FLOAT32, [0.5, 0.25, 0.125])),
    "clip.vision.image_std": (ARRAY, (FLOAT32, [0.5, 0.5, 0.5])),
}
EMBEDDING: Tensor = ("token_embd.weight", (8, len(TOKENS)), F32, 0)
LAYER: Tensor = ("blk.0.attn_norm.weight", (8,), F32, 512)
UP: Tensor = ("v.blk.0.ffn_up.weight", (8, 16), F32, 0)
TOWER_LAYER: Tensor = ("v.blk.1.ln1.weight", (8,), F32, 512)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hydra-engine" / "gguf"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "files"
    path.mkdir()
    return path


def write(path: Path, settings: dict[str, tuple[int, Any]], tensors: tuple[Tensor, ...]) -> Path:
    listed: list[Setting] = [(name, *value) for name, value in settings.items()]
    path.write_bytes(gguf_bytes(listed, tensors, b"\0" * 4096))
    return path


def text(path: Path, **changes: Any) -> Path:
    return write(path, TEXT | changes, (EMBEDDING, LAYER))


def tower(path: Path, **changes: Any) -> Path:
    return write(path, TOWER | changes, (UP, TOWER_LAYER))


def found(model: Path, **options: Any) -> Path:
    return find_model_files(EngineConfig(model=str(model), **options)).model_path


def test_a_file_becomes_a_directory_with_links_to_it(folder: Path, cache: Path) -> None:
    made = found(text(folder / "my model.gguf"))
    assert made.parent == cache and made.name.startswith("my model-")
    assert (made / "model-00001.gguf").resolve() == (folder / "my model.gguf").resolve()
    spec = load_spec(made)
    assert (spec.family, spec.language.hidden_size, spec.language.tie_embeddings, spec.vision) == (
        "llama",
        8,
        True,
        None,
    )
    assert spec.eos_token_ids == (2, 7)  # the file's own, and the control token that ends an answer
    assert found(folder / "my model.gguf") == made  # nothing is made twice
    (folder / "my model.gguf").write_bytes((folder / "my model.gguf").read_bytes() + b"\0")
    assert found(folder / "my model.gguf") != made


def test_a_folder_means_its_model_and_its_mmproj(folder: Path) -> None:
    text(folder / "model.gguf")
    tower(folder / "mmproj-model.gguf")
    spec = load_spec(found(folder))
    assert spec.family == "llava" and spec.vision is not None and spec.image_token_id == 3
    assert spec.vision.preprocess.mean == (0.5, 0.25, 0.125)
    assert load_spec(found(folder / "model.gguf")).vision is None
    assert load_spec(found(folder / "model.gguf", mmproj=str(folder / "mmproj-model.gguf"))) == spec


def test_pictures_need_a_tower(folder: Path) -> None:
    text(folder / "model.gguf")
    alone = EngineConfig(model=str(folder / "model.gguf"))
    with pytest.raises(ConfigError, match="is a text model; for pictures give its vision tower with --mmproj"):
        check_tower(find_model_files(alone))
    check_tower(find_model_files(EngineConfig(model=alone.model, mmproj=str(tower(folder / "mmproj-model.gguf")))))
    check_tower(find_model_files(EngineConfig(model="demo")))


def test_a_vocabulary_without_a_token_for_pictures_gives_its_unknown_one(folder: Path) -> None:
    tokens = [token.replace("<image>", "<other>") for token in TOKENS]
    changes = {"tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)), "tokenizer.ggml.unknown_token_id": (UINT32, 0)}
    text(folder / "model.gguf", **changes)
    made = found(folder / "model.gguf", mmproj=str(tower(folder / "mmproj.gguf")))
    assert load_spec(made).image_token_id == 0
    assert json.loads((made / "tokenizer.json").read_text())["model"]["vocab"]["<image>"] == 0


def test_a_model_of_several_files_is_one(folder: Path) -> None:
    first = text(folder / "m-00001-of-00002.gguf")
    write(folder / "m-00002-of-00002.gguf", {}, (("output.weight", (8, len(TOKENS)), F32, 0),))
    made = found(folder)
    assert not load_spec(made).language.tie_embeddings  # the second file's tensors count
    assert len(list(made.glob("model-*.gguf"))) == 2
    assert found(first) == made
    (folder / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"one of 2 files, of which m-00002-of-00002.gguf is missing"):
        found(folder)


def test_folders_that_mean_no_one_model_are_refused(folder: Path) -> None:
    tower(folder / "mmproj-a.gguf")
    with pytest.raises(CheckpointError, match=r"has 0 GGUF models \(none beside mmproj\); name one of the files"):
        found(folder)
    text(folder / "a.gguf")
    tower(folder / "mmproj-b.gguf")
    with pytest.raises(
        CheckpointError, match=r"2 mmproj files \(mmproj-a.gguf, mmproj-b.gguf\); choose one with --mmproj"
    ):
        found(folder)
    assert load_spec(found(folder, mmproj=str(folder / "mmproj-b.gguf"))).vision is not None
    text(folder / "b.gguf")
    with pytest.raises(CheckpointError, match=r"has 2 GGUF models \(a.gguf, b.gguf\)"):
        found(folder)


def test_a_folder_with_a_config_is_a_hugging_face_directory(folder: Path) -> None:
    text(folder / "model.gguf")
    (folder / "config.json").write_text("{}")
    assert found(folder) == folder


YARN = {
    "llama.rope.scaling.type": (STRING, "yarn"),
    "llama.rope.scaling.factor": (FLOAT32, 4.0),
    "llama.rope.scaling.original_context_length": (UINT32, 16),
}
MAGNITUDE = 1 + 0.1 * math.log(4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"rope_type": "default"}),
        ({"llama.rope.scale_linear": (FLOAT32, 4.0)}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scaling.factor": (FLOAT32, 4.0)}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"llama.rope.scaling.factor": (FLOAT32, 4.0), "llama.rope.scale_linear": (FLOAT32, 2.0)},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scaling.factor": (FLOAT32, 0.0)}, {"rope_type": "default"}),
        (
            {"llama.rope.scaling.type": (STRING, "none"), "llama.rope.scaling.factor": (FLOAT32, 4.0)},
            {"rope_type": "default"},
        ),
        (YARN, {"attention_factor": MAGNITUDE, "original_max_position_embeddings": 16}),
        ({name: YARN[name] for name in list(YARN)[:2]}, {"original_max_position_embeddings": 64}),
        (YARN | {"llama.rope.scaling.finetuned": (BOOL, True)}, {"attention_factor": MAGNITUDE}),
        (YARN | {"llama.rope.scaling.attn_factor": (FLOAT32, 0.5)}, {"attention_factor": 0.5 * MAGNITUDE}),
        (YARN | {"llama.rope.scaling.yarn_attn_factor": (FLOAT32, 0.5)}, {"attention_factor": 0.5 * MAGNITUDE}),
        (YARN | {"llama.rope.scaling.yarn_log_multiplier": (FLOAT32, 1.0)}, {"attention_factor": 1.0}),
        (YARN | {"llama.rope.scaling.yarn_ext_factor": (FLOAT32, 1.0)}, {"rope_type": "yarn", "factor": 4.0}),
        (YARN | {"llama.rope.scaling.yarn_ext_factor": (FLOAT32, -1.0)}, {"rope_type": "yarn", "factor": 4.0}),
        (YARN | {"llama.rope.scaling.yarn_ext_factor": (FLOAT32, 0.0)}, {"rope_type": "linear", "factor": 4.0}),
        (YARN | {"llama.rope.scaling.yarn_beta_fast": (FLOAT32, 16.0)}, {"beta_fast": 16.0, "beta_slow": 1.0}),
    ],
)
def test_rotary_settings_are_read_as_llama_cpp_reads_them(
    folder: Path, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    base = {"llama.rope.freq_base": (FLOAT32, 50000.0)}
    found_parameters = load_spec(found(text(folder / "model.gguf", **base, **changes))).language.rope_parameters
    chosen = {name: found_parameters[name] for name in expected}
    assert chosen == pytest.approx(expected) and found_parameters["rope_theta"] == 50000.0


def test_frequencies_are_not_scaled_twice(folder: Path) -> None:
    """The file has two scalings: a factor, and the numbers of rope_freqs.weight."""
    settings = TEXT | {"llama.rope.scaling.factor": (FLOAT32, 4.0)}
    factors = ("rope_freqs.weight", (2,), F32, 1024)
    write(folder / "model.gguf", settings, (EMBEDDING, LAYER, factors))
    with pytest.raises(CheckpointError, match=r"twice, by llama.rope.scaling.factor and by rope_freqs.weight"):
        found(folder / "model.gguf")


def test_a_window_bounds_the_context(folder: Path) -> None:
    window = {"llama.attention.sliding_window": (UINT32, 24)}
    assert load_spec(found(text(folder / "model.gguf", **window))).max_model_len == 24


def test_settings_that_change_nothing_are_taken(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Unknown settings are named when the weights are opened."""
    neutral = {
        **{
            "llama.attention.scale": (FLOAT32, 0.5),
            "llama.logit_scale": (FLOAT32, 1.0),
            "llama.vocab_size": (UINT32, 8),
        },
        **{"llama.final_logit_softcapping": (FLOAT32, 0.0), "llama.attention.causal": (BOOL, True)},
        **{"llama.expert_count": (UINT32, 0), "llama.attention.sliding_window": (UINT32, 0)},
    }
    made = found(text(folder / "model.gguf", **neutral))
    assert load_spec(made).max_model_len == 64
    with open_checkpoint(made):
        assert not caplog.records
    odd = {"llama.pooling_type": (UINT32, 1), "llama.swin_norm": (BOOL, True), "other.thing": (UINT32, 1)}
    with open_checkpoint(found(text(folder / "odd.gguf", **odd))):
        (record,) = caplog.records
    assert record.getMessage().endswith(
        "these settings are not known and not read: llama.pooling_type, llama.swin_norm"
    )


def test_special_tokens_beyond_the_vocabulary_are_none(folder: Path) -> None:
    """Converters write -1 as an unsigned number."""
    none = {f"tokenizer.ggml.{name}_token_id": (UINT32, 2**32 - 1) for name in ("bos", "eos", "padding", "unknown")}
    made = found(text(folder / "model.gguf", **none))
    spec = load_spec(made)
    assert (spec.bos_token_id, spec.pad_token_id, spec.eos_token_ids) == (None, None, (7,))
    assert "bos_token" not in json.loads((made / "tokenizer_config.json").read_text())


@pytest.mark.parametrize("name", [None, "clip.vision.projector_type"])
def test_the_first_towers_of_llava_do_not_name_their_projector(folder: Path, name: str | None) -> None:
    settings = {key: value for key, value in TOWER.items() if key != "clip.projector_type"}
    settings |= {} if name is None else {name: (STRING, "mlp")}
    write(folder / "mmproj.gguf", settings, (UP, TOWER_LAYER))
    assert load_spec(found(text(folder / "model.gguf"), mmproj=str(folder / "mmproj.gguf"))).family == "llava"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": (STRING, "mamba")}, "is of architecture 'mamba'; supported are llama, qwen2"),
        ({"general.architecture": (STRING, "clip")}, "give the text model as MODEL and this file with --mmproj"),
        (
            {"llama.expert_count": (UINT32, 8)},
            "is a mixture of experts of architecture llama; supported are qwen3moe, ",
        ),
        ({"llama.context_length": (STRING, "x")}, "llama.context_length in model.gguf must be a whole number"),
        ({"llama.block_count": (UINT32, 2**31)}, "has no blk.2147483647.attn_norm.weight, but llama.block_count is"),
        ({"llama.attention.head_count": (UINT32, 0)}, "llama.attention.head_count in model.gguf must be"),
        ({"llama.rope.dimension_count": (UINT32, 2)}, "llama.rope.dimension_count in model.gguf must be 4"),
        ({"llama.rope.scaling.type": (STRING, "longrope")}, "must be none, linear or yarn, not 'longrope'"),
        (
            {"tokenizer.ggml.tokens": (ARRAY, (INT32, [1]))},
            "tokenizer.ggml.tokens in model.gguf must be a list of texts",
        ),
        ({"tokenizer.ggml.eos_token_id": (STRING, "x")}, "tokenizer.ggml.eos_token_id in model.gguf must be"),
        ({"llama.rope.scaling.alpha": (FLOAT32, 2.0)}, r"by llama.rope.scaling.alpha, which is not supported"),
        (
            YARN | {"llama.rope.scaling.yarn_ext_factor": (FLOAT32, 0.5)},
            r"yarn_ext_factor in model.gguf must be 0 or 1",
        ),
        (YARN | {"llama.rope.scaling.yarn_log_multiplier": (FLOAT32, -1.0)}, "yarn_log_multiplier in model.gguf must"),
        (
            {"llama.rope.scaling.attn_factor": (FLOAT32, 2.0)},
            r"attn_factor or yarn_attn_factor other than 1 beside rot",
        ),
        ({"llama.attention.scale": (FLOAT32, 0.1)}, r"llama.attention.scale in model.gguf must be 1 / sqrt\(4\)"),
        ({"llama.logit_scale": (FLOAT32, 0.1)}, "llama.logit_scale in model.gguf must be 0 or 1, not '0.1'"),
        ({"llama.final_logit_softcapping": (FLOAT32, 30.0)}, "final_logit_softcapping in model.gguf must be 0, not"),
        ({"llama.attention.causal": (BOOL, False)}, "llama.attention.causal in model.gguf must be 1, not 'False'"),
    ],
)
def test_text_models_that_cannot_run_are_refused(
    folder: Path, cache: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        found(text(folder / "model.gguf", **changes))
    assert not cache.exists() or not any(cache.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": (STRING, "llama")}, "mmproj.gguf is not an mmproj file"),
        (
            {"clip.projector_type": (STRING, "pixtral")},
            "projector of type 'pixtral' beside a text model of architecture",
        ),
        (
            {"clip.projector_type": (STRING, "qwen2vl_merger")},
            "supported are mlp with llama, qwen2vl_merger with qwen2vl",
        ),
        (
            {"clip.vision.image_mean": (ARRAY, (FLOAT32, [1.0]))},
            "image_mean in mmproj.gguf must be a list of 3 numbers",
        ),
        ({"clip.vision.block_count": (UINT32, 10**9)}, "mmproj.gguf has no v.blk.999999999.ln1.weight"),
        ({"clip.vision.block_count": (FLOAT32, 1.5)}, "clip.vision.block_count in mmproj.gguf must be"),
    ],
)
def test_towers_that_cannot_run_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    text(folder / "model.gguf")
    with pytest.raises(CheckpointError, match=message):
        found(folder / "model.gguf", mmproj=str(tower(folder / "mmproj.gguf", **changes)))


def test_a_last_layer_does_not_stand_for_those_before_it(folder: Path) -> None:
    last: Tensor = (f"v.blk.{2**31 - 1}.ln1.weight", (8,), F32, 512)
    write(folder / "mmproj.gguf", TOWER | {"clip.vision.block_count": (UINT32, 2**31)}, (UP, last))
    with pytest.raises(CheckpointError, match=r"block_count in mmproj.gguf must be at most 1024, not"):
        found(text(folder / "model.gguf"), mmproj=str(folder / "mmproj.gguf"))


def test_tiles_need_their_own_token(folder: Path) -> None:
    """Vocabularies of InternVL have Qwen's tokens for pictures besides, which its tower is not for."""
    renamed = {name.replace("llama", "qwen2"): value for name, value in TEXT.items()}
    file = write(folder / "model.gguf", renamed | {"general.architecture": (STRING, "qwen2")}, (EMBEDDING, LAYER))
    scaled = {"clip.projector_type": (STRING, "internvl"), "clip.vision.projector.scale_factor": (UINT32, 2)}
    with pytest.raises(CheckpointError, match=r"model.gguf has no token <IMG_CONTEXT>, which stands for pictures"):
        found(file, mmproj=str(tower(folder / "mmproj.gguf", **scaled)))


def test_files_that_are_not_there_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no file"):
        found(folder / "none.gguf")
    text(folder / "model.gguf")
    with pytest.raises(CheckpointError, match=r"there is no file .*none"):
        found(folder / "model.gguf", mmproj=str(folder / "none"))
    with pytest.raises(ConfigError, match="mmproj belongs to a MODEL of GGUF files"):
        found(Path("demo"), mmproj="x.gguf")
    with pytest.raises(ConfigError, match="GGUF files are for native models"):
        found(folder / "model.gguf", model_impl="transformers")


def test_a_cache_that_cannot_be_written_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot write .*: Not a directory; set XDG_CACHE_HOME to another folder"):
        found(text(folder / "model.gguf"))


def test_rotary_factors_must_be_numbers_of_32_bits(folder: Path) -> None:
    path = write(folder / "model.gguf", TEXT, (EMBEDDING, LAYER, ("rope_freqs.weight", (2,), 1, 1024)))
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight in model.gguf must be F32, not F16"):
        found(path)
    path = write(folder / "other.gguf", TEXT, (EMBEDDING, LAYER, ("rope_freqs.weight", (3,), F32, 1024)))
    with pytest.raises(CheckpointError, match="scales rotary frequencies"):
        found(path)

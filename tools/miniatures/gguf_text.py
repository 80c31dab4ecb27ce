"""Text models as GGUF files: names and fields as llama.cpp's convert_hf_to_gguf.py writes them with the `gguf` package.

Spelled out here once more, so that the engine's table has something to be wrong against.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Kind = str  # a name of gguf.GGMLQuantizationType
ARCHITECTURES = {
    **{"llava": "llama", "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"},
    **{
        "qwen3_5_text": "qwen35",
        "qwen3_5": "qwen35",
        "qwen2_vl": "qwen2vl",
        "qwen2_5_vl": "qwen2vl",
        "qwen3_vl": "qwen3vl",
        "qwen3_moe": "qwen3moe",
        "qwen3_vl_moe": "qwen3vlmoe",
        "qwen3_5_moe": "qwen35moe",
        "qwen3_5_moe_text": "qwen35moe",
    },
}
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_HEAD = [(r"lm_head\.weight", "output.weight")]
_TEXT = [
    (r"embed_tokens\.weight", "token_embd.weight"),
    (r"norm\.weight", "output_norm.weight"),
    (r"layers\.(\d+)\.input_layernorm\.(\w+)", r"blk.\1.attn_norm.\2"),
    (r"layers\.(\d+)\.post_attention_layernorm\.(\w+)", r"blk.\1.ffn_norm.\2"),
    (r"layers\.(\d+)\.self_attn\.([qkv])_proj\.(\w+)", r"blk.\1.attn_\2.\3"),
    (r"layers\.(\d+)\.self_attn\.o_proj\.(\w+)", r"blk.\1.attn_output.\2"),
    (r"layers\.(\d+)\.self_attn\.([qk])_norm\.(\w+)", r"blk.\1.attn_\2_norm.\3"),
    (r"layers\.(\d+)\.mlp\.(gate|up|down)_proj\.(\w+)", r"blk.\1.ffn_\2.\3"),
    (r"layers\.(\d+)\.mlp\.shared_expert\.(gate|up|down)_proj\.weight", r"blk.\1.ffn_\2_shexp.weight"),
    (r"layers\.(\d+)\.mlp\.shared_expert_gate\.weight", r"blk.\1.ffn_gate_inp_shexp.weight"),
    (r"layers\.(\d+)\.mlp\.gate\.weight", r"blk.\1.ffn_gate_inp.weight"),
    (r"layers\.(\d+)\.mlp\.experts\.(gate|up|down)_proj", r"blk.\1.ffn_\2_exps.weight"),
    (r"layers\.(\d+)\.linear_attn\.in_proj_qkv\.weight", r"blk.\1.attn_qkv.weight"),
    (r"layers\.(\d+)\.linear_attn\.in_proj_z\.weight", r"blk.\1.attn_gate.weight"),
    (r"layers\.(\d+)\.linear_attn\.in_proj_a\.weight", r"blk.\1.ssm_alpha.weight"),
    (r"layers\.(\d+)\.linear_attn\.in_proj_b\.weight", r"blk.\1.ssm_beta.weight"),
    (r"layers\.(\d+)\.linear_attn\.(conv1d|norm)\.weight", r"blk.\1.ssm_\2.weight"),
    (r"layers\.(\d+)\.linear_attn\.out_proj\.weight", r"blk.\1.ssm_out.weight"),
    (r"layers\.(\d+)\.linear_attn\.A_log", r"blk.\1.ssm_a"),
    (r"layers\.(\d+)\.linear_attn\.dt_bias", r"blk.\1.ssm_dt.bias"),
]


def text_writer(path: Path, config: Mapping[str, Any], model_dir: Path, **options: Any) -> Any:
    """A `gguf.GGUFWriter` with all fields and the tokenizer; tensors are to be added. `config` is config.json's."""
    text = config.get("text_config", config)
    of = text if config["model_type"] == "internvl" else config  # its decoders are of several kinds
    writer: Any = gguf.GGUFWriter(path, ARCHITECTURES[of["model_type"]], **options)
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    if "intermediate_size" in text:
        writer.add_feed_forward_length(text["intermediate_size"])
    if "moe_intermediate_size" in text:
        _add_experts(writer, text)
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    if "head_dim" in text:
        writer.add_key_length(text["head_dim"])
        writer.add_value_length(text["head_dim"])
    rope = text["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if "mrope_section" in rope or "linear_num_key_heads" in text:
        writer.add_rope_dimension_sections([*rope.get("mrope_section", (11, 11, 10)), 0])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if "linear_num_key_heads" in text:
        _add_delta_nets(writer, text)
    _add_tokenizer(writer, model_dir, text["vocab_size"])
    return writer


def _add_experts(writer: Any, text: Mapping[str, Any]) -> None:
    writer.add_expert_count(text.get("num_local_experts") or text["num_experts"])
    writer.add_expert_used_count(text["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(text["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in text:
        writer.add_expert_shared_feed_forward_length(text["shared_expert_intermediate_size"])


def _add_delta_nets(writer: Any, text: Mapping[str, Any]) -> None:
    writer.add_ssm_conv_kernel(text["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(text["linear_key_head_dim"])
    writer.add_ssm_group_count(text["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(text["linear_num_value_heads"])
    writer.add_ssm_inner_size(text["linear_value_head_dim"] * text["linear_num_value_heads"])
    writer.add_full_attention_interval(text.get("full_attention_interval", 4))
    writer.add_rope_dimension_count(int(text["head_dim"] * text["rope_parameters"]["partial_rotary_factor"]))


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def text_name(name: str) -> str | None:
    """GGUF name of a tensor of the directory; None if it is not part of the text model."""
    head = renamed(name.removeprefix("language_model."), _HEAD)
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    return head if head is not None or prefix is None else renamed(name.removeprefix(prefix), _TEXT)


def renamed(name: str, rules: Sequence[tuple[str, str]]) -> str | None:
    found = (re.sub(pattern, new, name) for pattern, new in rules if re.fullmatch(pattern, name))
    return next(found, None)


def random_blocks(kind: Kind, rows: int, width: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Bytes of `kind`, uint8 [rows, bytes of a row], with finite scales; for types that nothing here quantises to."""
    number = gguf.GGMLQuantizationType[kind]
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows * width // num_values, num_bytes), dtype=np.uint8)
    for at in {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2)}.get(kind, (0,)):
        steps = rng.normal(0, 0.01, len(raw)).astype(np.float16)
        raw[:, at : at + 2] = steps.view(np.uint8).reshape(-1, 2)
    return raw.reshape(rows, -1)


def write_random_text(path: Path, model_dir: Path, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
    """The text model of a directory without weights: matrices in random blocks of Q4_K, its head in those of Q6_K, and
    rows that are not whole blocks of 256 in Q5_0, as llama.cpp has it. `shapes`: by the names of weights files. Tensors
    wait in a temporary file, not in memory."""
    config = json.loads((model_dir / "config.json").read_text())
    writer = text_writer(path, config, model_dir, use_temp_file=True)
    for index, (name, shape) in enumerate(shapes.items()):
        new = text_name(name)
        if new is None:
            continue
        if len(shape) == 1:
            writer.add_tensor(new, np.ones(shape, dtype=np.float32))
        else:
            kind = "Q5_0" if shape[1] % 256 else "Q6_K" if new == "output.weight" else "Q4_K"
            blocks = random_blocks(kind, shape[0], shape[1], seed + index)
            writer.add_tensor(new, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    finish(writer)


def _add_tokenizer(writer: Any, model_dir: Path, vocab_size: int) -> None:
    """Byte-level BPE as the converter reads it from tokenizer.json; unknown ids become unused tokens."""
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    if tokenizer["model"]["type"] != "BPE":
        raise SystemExit(f"{model_dir}: only vocabularies of type BPE can be written, not {tokenizer['model']['type']}")
    named = {index: (token, 1) for token, index in tokenizer["model"]["vocab"].items()}
    named |= {one["id"]: (one["content"], 3 if one["special"] else 4) for one in tokenizer["added_tokens"]}
    rows = [named.get(index, (f"[PAD{index}]", 5)) for index in range(max(vocab_size, 1 + max(named)))]
    tokens, kinds = [token for token, _ in rows], [kind for _, kind in rows]
    writer.add_tokenizer_model("gpt2")
    rule = "qwen2" if writer.arch.startswith("qwen") else "gpt-2"
    writer.add_tokenizer_pre("qwen35" if writer.arch.startswith("qwen35") else rule)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if merges := tokenizer["model"]["merges"]:  # pairs, in older files as one text
        writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    settings = json.loads((model_dir / "tokenizer_config.json").read_text())
    for name in ("bos", "eos", "pad"):
        given = settings.get(f"{name}_token")
        token = given["content"] if isinstance(given, dict) else given
        if token is not None:
            getattr(writer, f"add_{name}_token_id")(tokens.index(token))
    file = model_dir / "chat_template.jinja"
    template = file.read_text() if file.exists() else settings.get("chat_template")
    if template is not None:
        writer.add_chat_template(template)

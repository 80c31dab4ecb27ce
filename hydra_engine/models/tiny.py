"""Random checkpoints in Hugging Face's format, made without a hub: miniatures for tests, a larger one for benchmarks.

    python -m hydra_engine.models.tiny --bench DIR

Everything is drawn from a seed. Uses transformers to describe and save models, never to run them; nothing that serves
imports this.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

IMAGE_TOKEN = "<image>"
SPECIAL_TOKENS = ("<pad>", "<s>", "<|end|>", "<|user|>", "<|assistant|>", IMAGE_TOKEN)
PAD_ID, BOS_ID, EOS_ID, _, _, IMAGE_ID = range(len(SPECIAL_TOKENS))
TINY_VOCABULARY = len(SPECIAL_TOKENS) + 256
CHAT_TEMPLATE = """\
{{- '<s>' -}}
{%- for message in messages -%}
{{- '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- else -%}{{- '<image>' -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

_TEXT = {
    "vocab_size": TINY_VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}
_VISION = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
    "projection_dim": 48,
}
_BENCH_TEXT = {
    **_TEXT,
    "vocab_size": 32064,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
_BENCH_VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}
_SAVED_NAMES = (  # in memory -> on disk, for LLaVA
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.vision_tower.", "vision_tower."),
)


def make_tiny(
    family: str,
    directory: Path,
    *,
    seed: int,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> None:
    """Writes a checkpoint of `family` ("llava", "llama", "mistral", "qwen2") with tokenizer and processor.

    `text` and `vision` replace fields of the decoder's and the tower's config, `overrides` those of the top level.
    Norms and biases are random too, so that a mistake in them shows.
    """
    config = build_config(family, text=text, vision=vision, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto = transformers.AutoModelForImageTextToText if family == "llava" else transformers.AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            _randomise(name, parameter.data)
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    model.generation_config.save_pretrained(directory)
    _save_processor(directory, config, family)


def build_config(
    family: str, *, text: Mapping[str, Any] | None = None, vision: Mapping[str, Any] | None = None, **overrides: Any
) -> Any:
    """The transformers config of a miniature."""
    if family != "llava":
        return transformers.AutoConfig.for_model(family, **{**_TEXT, **(text or {}), **overrides})
    top: dict[str, Any] = {
        "image_token_index": IMAGE_ID,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        **overrides,
    }
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**{**_VISION, **(vision or {})}),
        text_config=transformers.LlamaConfig(**{**_TEXT, **(text or {})}),
        **top,
    )


def make_bench_checkpoint(directory: Path, *, seed: int = 0) -> int:
    """LLaVA of about 0.5 billion parameters in bfloat16: a CLIP-L/336 tower over a decoder of 0.2; returns the number.

    Written tensor by tensor: the model is described on the meta device and never exists in memory.
    """
    config = build_config("llava", text=_BENCH_TEXT, vision=_BENCH_VISION)
    with torch.device("meta"):
        described = transformers.LlavaForConditionalGeneration(config)
    shapes = {_saved_name(name): tuple(tensor.shape) for name, tensor in described.named_parameters()}
    directory.mkdir(parents=True, exist_ok=True)
    config.architectures = ["LlavaForConditionalGeneration"]
    config.dtype = "bfloat16"
    config.save_pretrained(directory)
    transformers.GenerationConfig.from_model_config(config).save_pretrained(directory)
    _save_processor(directory, config, "llava")
    _write_random(directory / "model.safetensors", shapes, seed)
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def _saved_name(name: str) -> str:
    for in_memory, on_disk in _SAVED_NAMES:
        if name.startswith(in_memory):
            return on_disk + name.removeprefix(in_memory)
    return name


def _randomise(name: str, tensor: Tensor) -> None:
    """In place: norms stay near 1, biases near 0; the decoder mixes enough for its text not to fall into a loop."""
    if "norm" in name or "layrnorm" in name:
        tensor.normal_(1.0 if name.endswith("weight") else 0.0, 0.1)
    elif tensor.dim() == 1:
        tensor.normal_(0.0, 0.1)
    elif "embed" in name and tensor.dim() == 2:
        tensor.normal_(0.0, 0.5)
    else:
        gain = 1.0 if "vision_tower" in name or "projector" in name else 2.0
        tensor.normal_(0.0, gain / tensor[0].numel() ** 0.5)


def _write_random(path: Path, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        end = position + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with torch.random.fork_rng(devices=[]), open(path, "wb") as file:
        torch.manual_seed(seed)
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            tensor = torch.empty(shape)
            _randomise(name, tensor)
            file.write(tensor.to(torch.bfloat16).view(torch.int16).numpy().data)


def _save_processor(directory: Path, config: Any, family: str) -> None:
    """A byte-level tokenizer with one word for every further id, a chat template, and for llava a CLIP processor."""
    text = config.get_text_config()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL_TOKENS, *alphabet]
    words += [f"Ġw{index}" for index in range(len(words), text.vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|end|>",
        pad_token="<pad>",
        additional_special_tokens=["<|user|>", "<|assistant|>", IMAGE_TOKEN],
        model_max_length=text.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    if family != "llava":
        fast.save_pretrained(directory)
        return
    side = config.vision_config.image_size
    transformers.LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side}),
        tokenizer=fast,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=1,
        image_token=IMAGE_TOKEN,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint with random weights.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--bench", action="store_true", help="about 0.5 billion parameters instead of a miniature")
    parser.add_argument("--family", default="llava", choices=("llava", "llama", "mistral", "qwen2"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.bench:
        make_bench_checkpoint(arguments.directory, seed=arguments.seed)
    else:
        make_tiny(arguments.family, arguments.directory, seed=arguments.seed)


if __name__ == "__main__":
    main()

"""Common parts of the random checkpoints: family descriptions, a byte-level tokenizer, seeded weights."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from hydra_engine.models.loading.random_weights import randomise

IMAGE_TOKEN = "<image>"
SPECIAL_TOKENS = ("<pad>", "<s>", "<|end|>", "<|user|>", "<|assistant|>", IMAGE_TOKEN)
PAD_ID, BOS_ID, EOS_ID, _, _, IMAGE_ID = range(len(SPECIAL_TOKENS))
NUM_BYTES = 256
REFERENCE = "hf"  # subfolder of a model in its authors' layout: the same one in transformers'
GPTQ_GROUP = 128
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "I32": torch.int32}
TINY_VOCABULARY = len(SPECIAL_TOKENS) + NUM_BYTES
TEXT: dict[str, Any] = {
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
# A mixture of experts in place of the MLPs.
MIXTURE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}


def chat_template(image: str = IMAGE_TOKEN, video: str = "") -> str:
    """Turns between marks; a picture is `image`, a video `video`."""
    return (
        "{{- '<s>' -}}{%- for message in messages -%}"
        "{{- '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' -}}"
        "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
        "{%- for part in message['content'] -%}"
        "{%- if part['type'] == 'text' -%}{{- part['text'] -}}"
        "{%- elif part['type'] == 'video' -%}{{- '" + video + "' -}}"
        "{%- else -%}{{- '" + image + "' -}}{%- endif -%}"
        "{%- endfor -%}{%- endif -%}{{- '<|end|>' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
    )


@dataclass(frozen=True, slots=True)
class TinyFamily:
    """`build_config(text, vision, overrides)` makes transformers' config; `extra_tokens` follow the shared vocabulary
    (ids from TINY_VOCABULARY on); `save_processor(directory, config, tokenizer)` writes tokenizer and processor files.
    `build_model(config)` is the model to save, of a layout without a class in transformers.
    With `says_marks` false its greedy text has none of these tokens, as that of trained models.
    """

    build_config: Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], Any]
    save_processor: Callable[[Path, Any, Any], None]
    extra_tokens: tuple[str, ...] = ()
    template: str = chat_template()
    with_images: bool = True
    says_marks: bool = True
    build_model: Callable[[Any], Any] | None = None


def make_checkpoint(
    family: TinyFamily,
    directory: Path,
    *,
    seed: int,
    dtype: str,
    max_shard_size: str,
    text: Mapping[str, Any],
    vision: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> None:
    config = family.build_config(text, vision, overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto = transformers.AutoModelForImageTextToText if family.with_images else transformers.AutoModelForCausalLM
        build = family.build_model or partial(auto.from_config, dtype=torch.float32)
        model = build(config)
        for name, parameter in model.named_parameters():
            randomise(name, parameter.data)
            if _is_centred(config.get_text_config(), name):
                parameter.data -= 1
        if not family.says_marks:
            model.get_output_embeddings().weight.data[TINY_VOCABULARY:][: len(family.extra_tokens)] = 0
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    model.generation_config.save_pretrained(directory)
    save_processor(directory, config, family)


def _is_centred(text: Any, name: str) -> bool:
    """Norms of this decoder multiply by 1 + weight, but for the one inside a delta net; the tower's are like others."""
    norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return (
        bool(text.model_type in ("qwen3_5_text", "qwen3_5_moe_text"))
        and norm
        and "vision" not in name
        and "merger" not in name
    )


def write_random(path: Path, shapes: Mapping[str, tuple[int, ...]], seed: int, gptq: Collection[str] = ()) -> None:
    """A safetensors file, tensor by tensor: in bfloat16, but the matrices `gptq` in 4 bits as GPTQ stores them."""
    parts = [part for item in shapes.items() for part in (_gptq_parts(*item) if item[0] in gptq else [(*item, "BF16")])]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape, dtype in parts:
        end = position + _DTYPES[dtype].itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with torch.random.fork_rng(devices=[]), open(path, "wb") as file:
        torch.manual_seed(seed)
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape, dtype in parts:
            tensor = _words(name, shape) if dtype == "I32" else _floats(name, shape)
            file.write(tensor.to(_DTYPES[dtype]).flatten().view(torch.uint8).numpy().data)


def _gptq_parts(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...], str]]:
    """A symmetric matrix [N, K] with neighbours in a group."""
    module, (num_out, num_in) = name.removesuffix("weight"), shape
    groups = num_in // GPTQ_GROUP
    return [
        (f"{module}qweight", (num_in // 8, num_out), "I32"),
        (f"{module}qzeros", (groups, num_out // 8), "I32"),
        (f"{module}scales", (groups, num_out), "F16"),
        (f"{module}g_idx", (num_in,), "I32"),
    ]


def _words(name: str, shape: tuple[int, ...]) -> Tensor:
    if name.endswith("g_idx"):
        return torch.arange(shape[0]) // GPTQ_GROUP
    if name.endswith("qzeros"):
        return torch.full(shape, 0x77777777)  # 8 less 1, as its first format has it
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def _floats(name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = torch.empty(shape)
    if name.endswith("scales"):  # numbers from -8 to 7 times these are as large as a matrix in bfloat16
        return tensor.uniform_(0.3, 0.5).div_((shape[0] * GPTQ_GROUP) ** 0.5)
    randomise(name, tensor)
    return tensor


def save_processor(directory: Path, config: Any, family: TinyFamily) -> None:
    """A byte-level tokenizer with one word for every further id, a chat template, and the family's own files."""
    text = config.get_text_config()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL_TOKENS, *alphabet, *family.extra_tokens]
    words += [f"Ġw{index}" for index in range(len(words), text.vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|end|>",
        pad_token="<pad>",
        additional_special_tokens=["<|user|>", "<|assistant|>", IMAGE_TOKEN, *family.extra_tokens],
        model_max_length=text.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = family.template
    family.save_processor(directory, config, fast)


def write_processor(
    directory: Path,
    tokenizer: Any,
    processor_class: str,
    images: Any,
    settings: Mapping[str, Any] | None = None,
    /,
    **marks: str,
) -> None:
    """Writes the files of a processor, whose class may insist on a video processor, which needs torchvision to be made.
    `settings` are the processor's own, `marks` the names that the tokenizer has for its tokens, such as image_token."""
    named = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        extra_special_tokens=marks,
        model_max_length=tokenizer.model_max_length,
        clean_up_tokenization_spaces=False,
    )
    named.chat_template = tokenizer.chat_template
    named.save_pretrained(directory)
    values = {"processor_class": processor_class, "image_processor": images.to_dict(), **(settings or {})}
    (directory / "processor_config.json").write_text(json.dumps(values, default=str))


def set_aside(directory: Path) -> tuple[Path, dict[str, Tensor]]:
    """Moves what is saved so far to the subfolder `REFERENCE`. Returns that and its tensors."""
    origin = directory / REFERENCE
    origin.mkdir()
    for path in [*directory.glob("*.json"), *directory.glob("*.safetensors")]:
        path.rename(origin / path.name)
    shutil.copyfile(origin / "generation_config.json", directory / "generation_config.json")
    return origin, {name: tensor for path in origin.glob("*.safetensors") for name, tensor in load_file(path).items()}


def extra_id(family: TinyFamily, token: str) -> int:
    return TINY_VOCABULARY + family.extra_tokens.index(token)

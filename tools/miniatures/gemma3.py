"""Random Gemma 3 checkpoints: a SigLIP tower, layers with and without a sliding window, pictures that see themselves.

The tokenizer joins newlines, as Gemma's does, so that the text around a placeholder matters to what stands next to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from tools.miniatures.base import BOS_ID, EOS_ID, PAD_ID, TEXT, TINY_VOCABULARY, TinyFamily, chat_template

BEGIN, END, SOFT = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
_MARKS = (BEGIN, END, SOFT)
_NEWLINES = ("ĊĊ", "ĊĊĊ")  # byte-level spelling
_VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 7,
}


def _build_config(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    begin, end, soft = range(TINY_VOCABULARY, TINY_VOCABULARY + len(_MARKS))
    words = {
        **TEXT,
        "vocab_size": TINY_VOCABULARY + len(_MARKS) + len(_NEWLINES),
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 24,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        **text,
    }
    top = {
        "mm_tokens_per_image": 16,
        "boi_token_index": begin,
        "eoi_token_index": end,
        "image_token_index": soft,
        "tie_word_embeddings": False,  # with a tied head a random model repeats its last word for ever
    }
    config = transformers.Gemma3Config(
        vision_config={**_VISION, **vision}, text_config=transformers.Gemma3TextConfig(**words), **{**top, **overrides}
    )
    config.bos_token_id, config.eos_token_id, config.pad_token_id = BOS_ID, EOS_ID, PAD_ID
    return config


def _save_processor(directory: Path, config: Any, tokenizer: Any) -> None:
    side = config.vision_config.image_size
    transformers.Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(size={"height": side, "width": side}),
        tokenizer=_with_newlines(tokenizer),
        image_seq_length=config.mm_tokens_per_image,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(directory)


def _with_newlines(tokenizer: Any) -> Any:
    """The same tokenizer with words for two and three newlines, and the names that Gemma gives its marks."""
    values = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary: dict[str, int] = values["model"]["vocab"]
    unnamed = sorted((id, word) for word, id in vocabulary.items() if word.startswith("Ġw"))
    for newlines, (id, word) in zip(_NEWLINES, unnamed, strict=False):
        del vocabulary[word]
        vocabulary[newlines] = id
    values["model"]["merges"] = [["Ċ", "Ċ"], ["ĊĊ", "Ċ"]]
    joined = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(values)),
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        extra_special_tokens={"boi_token": BEGIN, "eoi_token": END, "image_token": SOFT},
        model_max_length=tokenizer.model_max_length,
        clean_up_tokenization_spaces=False,
    )
    joined.chat_template = tokenizer.chat_template
    return joined


GEMMA3 = TinyFamily(_build_config, _save_processor, extra_tokens=_MARKS, template=chat_template(BEGIN))

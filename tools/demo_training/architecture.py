"""The demo model's shape: a stock LLaVA, with every size cut down until one CPU core can train it."""

import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from tools.demo_training.tokenizer import IMAGE, IMAGE_SIZE, IMAGE_TOKENS, PATCH_SIZE

WIDTH = 128
# The default of .02 suits wide models; about 1/sqrt(WIDTH) learns several times faster here.
INITIAL_STD = 0.08


def build_config(tokenizer: PreTrainedTokenizerFast) -> LlavaConfig:
    """Vision tower, projector and text model, all of the same width."""
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = CLIPVisionConfig(
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        projection_dim=WIDTH,
        initializer_range=INITIAL_STD,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=WIDTH // 4,
        rms_norm_eps=1e-5,
        max_position_embeddings=2048,
        initializer_range=INITIAL_STD,
        tie_word_embeddings=True,
        **special,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.get_vocab()[IMAGE],
        image_seq_length=IMAGE_TOKENS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
        **special,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlavaForConditionalGeneration:
    """A freshly initialised model."""
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(build_config(tokenizer))
    for part in model.model.multi_modal_projector.modules():  # not covered by initializer_range
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=INITIAL_STD)
            nn.init.zeros_(part.bias)
    return model

"""Decoders whose layers are of two kinds (qwen3_5_text): which layer is what, and the shape of a gated delta net.

Reads the text part of config.json. Does not know states, slots or arithmetic.
"""

from __future__ import annotations

from hydra_engine.errors import CheckpointError
from hydra_engine.specs.base import DeltaShape, LayerKind
from hydra_engine.specs.fields import Fields

KINDS: dict[str, LayerKind] = {"linear_attention": "delta", "full_attention": "attention"}
INTERVAL = 4  # every fourth layer is attention where a config does not say


def layer_kinds(config: Fields, num_layers: int) -> tuple[LayerKind, ...]:
    """From layer_types, or full_attention_interval in configs without it."""
    named = config.get("layer_types")
    if named is None:
        interval = config.integer("full_attention_interval", INTERVAL)
        named = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(num_layers)]
    if not isinstance(named, list) or len(named) != num_layers or any(name not in KINDS for name in named):
        raise config.wrong("layer_types", f"a list of {num_layers} times linear_attention or full_attention")
    kinds = tuple(KINDS[name] for name in named)
    if "attention" not in kinds:
        raise config.wrong("layer_types", "a list with at least one full_attention: the KV cache counts tokens")
    return kinds


def delta_shape(config: Fields) -> DeltaShape:
    """The defaults are those of Qwen3_5TextConfig."""
    shape = DeltaShape(
        num_key_heads=config.integer("linear_num_key_heads", 16),
        num_value_heads=config.integer("linear_num_value_heads", 32),
        key_dim=config.integer("linear_key_head_dim", 128),
        value_dim=config.integer("linear_value_head_dim", 128),
        num_taps=config.integer("linear_conv_kernel_dim", 4, at_least=2),
    )
    if shape.num_value_heads % shape.num_key_heads:
        raise CheckpointError(
            f"{shape.num_value_heads} value heads of linear attention cannot share {shape.num_key_heads} key heads"
        )
    if not config.flag("attn_output_gate", True):
        raise config.wrong("attn_output_gate", "true: this text model type gates what attention gives")
    return shape

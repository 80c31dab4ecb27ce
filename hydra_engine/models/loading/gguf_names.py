"""Names of llama.cpp's converter -> canonical names, and how parts are joined.

Changes besides names: rows of queries and keys of llama-type decoders are permuted, and so are value heads of delta
nets, whose rates and norms are transformed; a tower's fused queries, keys and values may be separate, and so may the
frames of a patch's kernel. Does not know files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

Shape = tuple[int, ...]
Joined = Literal["alone", "rows", "frames", "row", "batch", "taps"]

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERT = re.compile(r"ffn_(gate|up|down)_exps\.(\d+)\.weight")
_TOWER_LAYER = re.compile(r"v\.blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias)")
_QKV = ("attn_q", "attn_k", "attn_v")

_TEXT = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_TEXT_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    **{"ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
}
_HYBRID_LAYER = {  # whole names where ours end in neither .weight nor .bias
    "post_attention_norm": "post_attention_layernorm",
    **{"attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z"},
    **{"ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b", "ssm_out": "linear_attn.out_proj"},
    **{"ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm"},
    **{"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
}
_CENTRED = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm")  # stored as the difference from 1
_VALUE_ROWS = ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_out", "ssm_conv1d", "ssm_a", "ssm_dt")
# Read where the config is made, or of no use.
_UNREAD = {"rope_freqs.weight"}


class _Tower(NamedTuple):
    """Names of a tower. `top`: names outside layers, `layer`: names inside, both without .weight and .bias unless the
    canonical name ends in neither. `fused`: the layer's fused queries, keys and values. `batch`: names whose canonical
    tensors have three dimensions, stored without dimensions of size 1."""

    top: Mapping[str, str]
    layers: str
    layer: Mapping[str, str]
    fused: str | None = None
    batch: frozenset[str] = frozenset()


_QWEN2_TOP = {
    "v.patch_embd": "visual.patch_embed.proj",
    "v.post_ln": "visual.merger.ln_q",
    "mm.0": "visual.merger.mlp.0",
    "mm.2": "visual.merger.mlp.2",
}
_QWEN_LAYER = {"attn_qkv": "attn.qkv", "attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"}
_TOWERS = {
    "llava": _Tower(
        {
            "v.class_embd": "vision_tower.embeddings.class_embedding",
            "v.patch_embd": "vision_tower.embeddings.patch_embedding",
            "v.position_embd": "vision_tower.embeddings.position_embedding",
            "v.pre_ln": "vision_tower.pre_layrnorm",
            "v.post_ln": "vision_tower.post_layernorm",
            "mm.0": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
        "vision_tower.encoder.layers",
        {
            **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
            **{"attn_out": "self_attn.out_proj", "ln1": "layer_norm1", "ln2": "layer_norm2"},
            **{"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        },
    ),
    "internvl": _Tower(
        {
            "v.class_embd": "vision_tower.embeddings.cls_token",
            "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
            "v.position_embd.weight": "vision_tower.embeddings.position_embeddings",
            "mm.model.mlp.0": "multi_modal_projector.layer_norm",
            "mm.model.mlp.1": "multi_modal_projector.linear_1",
            "mm.model.mlp.3": "multi_modal_projector.linear_2",
        },
        "vision_tower.encoder.layer",
        {
            **{f"attn_{part}": f"attention.{part}_proj" for part in "qkv"},
            **{f"attn_{part}_norm": f"attention.{part}_norm" for part in "qk"},
            **{"attn_out": "attention.projection_layer", "ln1": "layernorm_before", "ln2": "layernorm_after"},
            **{"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2", "ls1.weight": "lambda_1", "ls2.weight": "lambda_2"},
        },
        batch=frozenset(("v.class_embd", "v.position_embd.weight")),
    ),
    "qwen2_vl": _Tower(
        _QWEN2_TOP, "visual.blocks", {**_QWEN_LAYER, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}, "attn.qkv"
    ),
    "qwen2_5_vl": _Tower(
        _QWEN2_TOP,
        "visual.blocks",
        {**_QWEN_LAYER, **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}},
        "attn.qkv",
    ),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_5", "qwen3_vl_moe", "qwen3_5_moe"),
        _Tower(
            {
                "v.patch_embd": "visual.patch_embed.proj",
                "v.position_embd": "visual.pos_embed",
                "v.post_ln": "visual.merger.norm",
                "mm.0": "visual.merger.linear_fc1",
                "mm.2": "visual.merger.linear_fc2",
            },
            "visual.blocks",
            {**_QWEN_LAYER, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
            "attn.qkv",
        ),
    ),
}
_DEEPSTACK = re.compile(r"v\.deepstack\.(\d+)\.(norm|fc1|fc2)\.(weight|bias)")
_DEEPSTACK_PARTS = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}


class Order(NamedTuple):
    """A permutation of rows, or of `columns`: those after the first `keep` are viewed as four dimensions `cut` (-1:
    inferred), and the middle two are transposed."""

    cut: tuple[int, int, int, int]
    keep: int = 0
    columns: bool = False

    @property
    def unit(self) -> int:
        """Number of rows must be a multiple of this."""
        return abs(math.prod(self.cut))


class Source(NamedTuple):
    """Sources of a canonical tensor. `joined`: "rows" stacks parts by rows; "frames" makes a 3-D kernel of 2-D ones;
    "row" and "batch" prepend dimensions of 1 up to two and three; "taps" inserts one before the last. `value`: function
    of a stored number x, "x - 1" or "log -x"."""

    parts: tuple[str, ...]
    joined: Joined = "alone"
    order: Order | None = None
    value: Literal["x", "x - 1", "log -x"] = "x"


class Decoder(NamedTuple):
    """Shape of the decoder, as needed for names. Layers after the first `num_layers` predict further tokens. `heads`:
    (query, key) heads of llama-type decoders. `delta`: (key heads, value heads, rows of queries and keys together) of
    delta nets."""

    num_layers: int
    heads: tuple[int, int] | None = None
    delta: tuple[int, int, int] | None = None


def sources_by_name(shapes: Mapping[str, Shape], model_type: str, decoder: Decoder) -> dict[str, Source]:
    """Maps canonical names to sources. `shapes`: all tensors of all files; `model_type` of config.json. A tensor
    without a rule keeps its name."""
    swapped = _swapped(shapes)
    tower = _TOWERS.get(model_type)
    found: dict[str, Source] = {}
    for name in shapes:
        if name in _UNREAD:
            continue
        if name.startswith(("v.", "mm.")) and tower is not None:
            for canonical, source in _of_tower(name, shapes, tower, swapped):
                found[canonical] = source
        else:
            canonical, source = _of_text(name, decoder)
            prefix = "language_model." if tower is not None and canonical != name else ""
            found[prefix + canonical] = source
    return found


def _of_text(name: str, decoder: Decoder) -> tuple[str, Source]:
    """Returns the canonical name and the source of a tensor of the text model."""
    if new := _renamed(_TEXT, name):
        return new, Source((name,), value="x - 1" if decoder.delta and name == "output_norm.weight" else "x")
    layer = _LAYER.fullmatch(name)
    if layer is not None and int(layer[1]) >= decoder.num_layers:
        return f"mtp.{name}", Source((name,))
    if layer is not None and (expert := _EXPERT.fullmatch(layer[2])) is not None:
        return f"model.layers.{layer[1]}.mlp.experts.{expert[2]}.{expert[1]}_proj.weight", Source((name,))
    new = _renamed(_TEXT_LAYER | (_HYBRID_LAYER if decoder.delta else {}), layer[2]) if layer else None
    if layer is None or new is None:
        return name, Source((name,))
    source, part = Source((name,)), layer[2].partition(".")[0]
    if part == "ffn_gate_inp_shexp":
        source = source._replace(joined="row")
    if decoder.delta:
        source = _of_delta(source, part, *decoder.delta)
    elif decoder.heads and part in ("attn_q", "attn_k"):
        source = source._replace(order=Order((decoder.heads[part == "attn_k"], -1, 2, 1)))
    return f"model.layers.{layer[1]}.{new}", source


def _of_delta(source: Source, part: str, key_heads: int, value_heads: int, key_rows: int) -> Source:
    """Reorders value heads: canonical tensors group them by key head, the file has the first of every key head
    first."""
    if part in _CENTRED:
        return source._replace(value="x - 1")
    if part == "ssm_a":
        source = source._replace(value="log -x")
    if part == "ssm_conv1d":
        source = source._replace(joined="taps")
    if key_heads == value_heads or part not in _VALUE_ROWS:
        return source
    order = Order((1, value_heads // key_heads, key_heads, -1), columns=part == "ssm_out")
    return source._replace(order=order._replace(keep=key_rows if part in ("attn_qkv", "ssm_conv1d") else 0))


def _of_tower(name: str, shapes: Iterable[str], tower: _Tower, swapped: bool) -> Iterator[tuple[str, Source]]:
    """Yields the canonical name and source of a tensor, or nothing if another part yields the joined tensor."""
    if name == "v.patch_embd.weight.1":
        return
    if name == "v.patch_embd.weight" and f"{name}.1" in shapes:
        yield f"{tower.top['v.patch_embd']}.weight", Source((name, f"{name}.1"), "frames")
        return
    layer = _TOWER_LAYER.fullmatch(name)
    if layer is not None:
        yield from _of_tower_layer(name, layer, shapes, tower, swapped)
        return
    deep = _DEEPSTACK.fullmatch(name)
    if deep is not None:
        layers = sorted({int(found[1]) for found in map(_DEEPSTACK.fullmatch, shapes) if found})
        index = layers.index(int(deep[1]))
        yield f"visual.deepstack_merger_list.{index}.{_DEEPSTACK_PARTS[deep[2]]}.{deep[3]}", Source((name,))
        return
    yield _renamed(tower.top, name) or name, Source((name,), "batch" if name in tower.batch else "alone")


def _of_tower_layer(
    name: str, layer: re.Match[str], shapes: Iterable[str], tower: _Tower, swapped: bool
) -> Iterator[tuple[str, Source]]:
    part, kind = layer[2], layer[3]
    prefix = f"{tower.layers}.{layer[1]}"
    if tower.fused is not None and part in _QKV:
        parts = tuple(f"v.blk.{layer[1]}.{each}.{kind}" for each in _QKV)
        if part == _QKV[0]:
            yield f"{prefix}.{tower.fused}.{kind}", Source(tuple(p for p in parts if p in shapes), "rows")
        return
    if swapped:
        part = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}.get(part, part)
    new = _renamed(tower.layer, f"{part}.{kind}")
    yield (name if new is None else f"{prefix}.{new}"), Source((name,))


def _renamed(names: Mapping[str, str], name: str) -> str | None:
    stem, _, kind = name.rpartition(".")
    return names.get(name) or (f"{names[stem]}.{kind}" if stem in names else None)


def _swapped(shapes: Mapping[str, Shape]) -> bool:
    """True if ffn_down is the first matrix of a tower's MLP, as in older converters: it takes rows as wide as a
    norm's."""
    down, norm = shapes.get("v.blk.0.ffn_down.weight"), shapes.get("v.blk.0.ln2.weight")
    return down is not None and norm is not None and len(down) == 2 and down[1] == norm[0]

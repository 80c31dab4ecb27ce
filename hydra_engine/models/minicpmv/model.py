"""MiniCPM-V 4.6: pictures of any size packed into one pass through the tower, a merger inside it and one behind it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from torch import Tensor

from hydra_engine.models.inputs import VisionInput
from hydra_engine.models.layers.basic import LayerNorm
from hydra_engine.models.layers.vision import LayerShape, VisionLayer
from hydra_engine.models.layers.vision_packing import Packing, TowerInput, bounds_of, filled, spans_in
from hydra_engine.models.loading.parameters import Scope
from hydra_engine.models.minicpmv.parts import Merger, PackedPatches, WindowMerger
from hydra_engine.models.minicpmv.spec import MiniCpmVisionSpec


class MiniCpmVision:
    """Every span is one picture: the whole, or a slice."""

    weight_names = ("vision_tower.", "merger.")
    # Files have the names that transformers has in memory.
    renames = (
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.vision_tower.", "vision_tower."),
        ("model.merger.", "merger."),
    )

    def __init__(self, scope: Scope, spec: MiniCpmVisionSpec) -> None:
        self._spec = spec
        tower = scope.at("vision_tower")
        self._embed = PackedPatches(tower.at("embeddings"), spec)
        shape = LayerShape(
            spec.hidden_size, spec.num_heads, spec.intermediate_size, spec.hidden_act, spec.layer_norm_eps
        )
        self._layers = tuple(VisionLayer(tower.at(f"encoder.layers.{i}"), shape) for i in range(spec.num_layers))
        self._inner: WindowMerger | None = None
        if spec.insert_layer is None:
            tower.skip("vit_merger.")
        else:
            self._inner = WindowMerger(tower.at("vit_merger"), spec)
        self._norm = LayerNorm(tower.at("post_layernorm"), spec.hidden_size, spec.layer_norm_eps)
        self._merge = Merger(scope.at("merger"), spec)
        self._side = 2**spec.all_rounds  # patches that both sides of a picture are multiples of
        self.granule, self.num_values = self._side**2, self._embed.num_values
        # What comes before the layers, the layers, a merger between them, what comes behind. The layers before that
        # merger have four times the rows of the others.
        self.num_slices = len(self._layers) + 2 + (self._inner is not None)

    def reserve(self, room: int) -> None:
        """Nothing that it reads depends on a room."""

    def pack(self, batch: VisionInput, room: int = 0) -> Packing | None:
        """Indices: positions of the patches. Segments: pictures, and where the merger inside comes what is left of them
        behind it, and its windows."""
        grids = filled(batch.grids, room, self._side) if room else list(batch.grids)
        if grids is None:
            return None
        sizes = [rows * columns for _, rows, columns in grids]
        bounds = bounds_of(sizes, spans_in(room, self.granule) if room else 0)
        if bounds is None:
            return None
        num_patches = sum(sizes)
        longest = num_patches if room else max(sizes)
        packing = Packing(
            num_patches,
            num_patches // self.granule,
            (self._embed.places(grids),),
            (bounds,),
            (longest,),
        )
        if self._inner is None:
            return packing
        windows = np.arange(0, num_patches + 1, 4)
        return packing._replace(bounds=(bounds, bounds // 4, windows), longest=(longest, longest // 4, 4))

    def cut(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        return [self._embed.cut(picture) for picture in pixels]

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        (places,), slices, cu_seqlens = inputs.indices, inputs.slices, inputs.segments[0]
        x = self._embed(inputs.patches, places, slices)
        for index, layer in enumerate(slices.between(self._layers)):
            x = layer(x, cu_seqlens, slices)
            if self._inner is not None and index == self._spec.insert_layer:
                slices.checkpoint()
                _, cu_seqlens, windows = inputs.segments
                x = slices.rows(partial(self._inner, windows=windows), x, group=4)
        return (slices.rows(self._merge, self._norm(x), group=4**self._spec.num_rounds),)

"""The captured steps of a language lane: decode steps, small steps of decodes and prompts, and the sampling of special
rows after both. Does not know which of a lane's steps may be replayed."""

from __future__ import annotations

from hydra_engine.worker.language.device_slot_table import DeviceSlotTable
from hydra_engine.worker.language.graphs import DecodeGraphs
from hydra_engine.worker.language.mixed_graphs import MixedGraphs, MixedSize
from hydra_engine.worker.language.special_graphs import SpecialGraphs
from hydra_engine.worker.language.step import StepParts


class StepGraphs:
    """The graphs of all captured language steps. Sizes ascend. For the lane's thread only."""

    def __init__(
        self,
        parts: StepParts,
        slot_table: DeviceSlotTable,
        decode_sizes: tuple[int, ...],
        mixed_sizes: tuple[MixedSize, ...],
        max_model_len: int,
    ) -> None:
        self._device = parts.device
        max_rows = max(decode_sizes[-1], *(size.rows for size in mixed_sizes), 0)
        self.special = SpecialGraphs(parts.ops, parts.device, slot_table, max_rows)
        self.decodes = DecodeGraphs(parts, slot_table, self.special, decode_sizes, max_model_len)
        self.mixed = MixedGraphs(parts, slot_table, self.special, mixed_sizes, max_model_len)

    def prepare(self) -> None:
        """Prepares all graphs; call it before the first capture."""
        self.decodes.prepare()
        self.mixed.prepare()

    @property
    def _order(self) -> list[int | MixedSize]:
        return [*reversed(self.mixed.sizes), *reversed(self.decodes.sizes)]

    @property
    def wanted(self) -> list[tuple[int, int]]:
        """(partition, number of the graph there) of all graphs in capture order: the largest first, whose memory the
        smaller ones reuse."""
        partitions = range(self._device.partitions.count)
        return [(partition, number) for partition in partitions for number in range(len(self._order))]

    def capture(self, partition: int, number: int) -> None:
        """Captures one graph; no step may be in flight."""
        size = self._order[number]
        if isinstance(size, MixedSize):
            self.mixed.capture(partition, size)
        else:
            self.decodes.capture(partition, size)

    @property
    def num_bytes(self) -> int:
        """Device memory of the graphs."""
        return self.decodes.num_bytes + self.mixed.num_bytes + self.special.num_bytes

    @property
    def num_graphs(self) -> int:
        """Number of graphs: each captured step is followed by one for special rows."""
        return 2 * (self.decodes.num_captured + self.mixed.num_captured)

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Rows of the captured decode steps, ascending."""
        return self.decodes.captured_sizes

    @property
    def captured_tokens(self) -> int:
        """Tokens of the largest captured step with prompts; 0: there is none."""
        return self.mixed.captured_tokens

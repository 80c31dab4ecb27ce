"""The parent's side of the processor children: pictures to payloads and plans, for models with a processor of their
own.

A child loads torch, which takes seconds and memory. So there is one until pictures wait for it; further ones start
beside it, and pictures wait for whichever is free. Does not import torch, does not know files or requests.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import numpy as np

from hydra_engine.core.ids import ImageDigest
from hydra_engine.core.messages import ArrayLayout, PixelPayload
from hydra_engine.core.processes import launch
from hydra_engine.core.processes.preloaded import Preloaded
from hydra_engine.errors import HydraError, InvalidImage, from_info
from hydra_engine.models.specs.base import SPAN_TOKEN_IDS, ItemPlan, MediaPlan, ProcessorSpec, View
from hydra_engine.preprocess.sandbox.child_host import ChildDied, ChildHost
from hydra_engine.preprocess.sandbox.processor_child import Picture, Processed

ANSWER_SECONDS = 60.0  # for a picture
MAX_ARRAY_BYTES = 1 << 30  # per picture

_FOLDERS = ("HOME", "TMPDIR", "HF_HOME", "HF_MODULES_CACHE")  # where transformers keeps code that comes with models
_SETTINGS = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_COMMAND = launch.command("hydra_engine.preprocess.sandbox.processor_child")


@dataclass(frozen=True, slots=True)
class ProcessedPicture(PixelPayload):
    """A payload, with the texts and counts that its placeholder's replacement needs."""

    prefix: str = ""
    suffix: str = ""
    num_tokens: int = 0
    num_patches: int = 0
    bidirectional: bool = False
    grid: tuple[int, int] = (0, 0)  # (rows, columns) of the tokens, for multimodal rotary positions

    def plan(self) -> MediaPlan:
        """The plan: text, the span, text."""
        item = ItemPlan(
            self.width,
            self.height,
            1,
            self.num_patches,
            self.num_tokens,
            (1, 1, self.num_patches),
            *self.grid,
            bidirectional=self.bidirectional,
        )
        parts = [part for part in (self.prefix, item, self.suffix) if part != ""]
        return MediaPlan((View.whole(self.width, self.height),), tuple(parts))


class ImageProcessor:
    """The model's own image processor, in up to `max_children` processes. Thread-safe."""

    def __init__(self, spec: ProcessorSpec, max_children: int = 1, preloaded: Preloaded | None = None) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._left = max_children - 1  # children that may still be started
        self._free = threading.Semaphore(1)  # one for each child that has been ready
        self._host = ChildHost(
            "run the model's image processor",
            _COMMAND,
            Processed,
            setup=spec,
            variables=_SETTINGS,
            inherited=_FOLDERS,
            max_answer_bytes=MAX_ARRAY_BYTES,
            preloaded=preloaded,
        )

    def process(self, digest: ImageDigest, size: tuple[int, int], pixels: bytes) -> ProcessedPicture:
        """Processes an upright RGB picture of `size` (width, height), row-major. Blocking. Raises InvalidImage if the
        processor refuses it or fails on it, Unavailable if no child can be started."""
        if not self._free.acquire(blocking=False):
            self._grow()
            self._free.acquire()
        try:
            answer, _ = self._host.run(Picture(*size, memoryview(pixels)), ANSWER_SECONDS)
        except ChildDied as error:
            raise _failed() from error
        finally:
            self._free.release()
        if answer.error is not None:
            raise from_info(answer.error)
        sizes = [math.prod(layout.shape) * np.dtype(layout.dtype).itemsize for layout in answer.arrays]
        on_grid = len(answer.token_ids) if self._spec.multimodal else 0
        if sizes != [len(data) for data in answer.data] or min(answer.grid) < 0 or math.prod(answer.grid) != on_grid:
            raise _failed()
        ids = np.asarray(answer.token_ids, dtype=np.int64)
        return ProcessedPicture(
            digest,
            width=size[0],
            height=size[1],
            data=b"".join((ids.tobytes(), *answer.data)),
            arrays=(ArrayLayout(SPAN_TOKEN_IDS, ids.dtype.str, ids.shape), *answer.arrays),
            prefix=answer.prefix,
            suffix=answer.suffix,
            num_tokens=ids.size,
            num_patches=answer.num_patches,
            bidirectional=self._spec.bidirectional,
            grid=answer.grid,
        )

    def _grow(self) -> None:
        """Starts one more child, if there may be one, without waiting for it."""
        with self._lock:
            if self._left == 0:
                return
            self._left -= 1
        threading.Thread(target=self._start_another, name="processor-start", daemon=True).start()

    def _start_another(self) -> None:
        try:
            self._host.start(fresh=True)
        except HydraError:  # the host has logged it; pictures go on through the others
            with self._lock:
                self._left += 1
        else:
            self._free.release()

    def warm_up(self) -> None:
        """Starts the first child and blocks until it is ready, so that the first picture need not wait."""
        self._host.start()

    def close(self) -> None:
        """Ends the children now, whatever they do."""
        self._host.close()


def _failed() -> InvalidImage:
    return InvalidImage("the picture cannot be used: the model's processor failed on it")

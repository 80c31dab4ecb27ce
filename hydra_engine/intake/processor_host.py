"""The parent's side of the processor child: pictures of models that run through transformers, to payloads and plans.

One child, because it holds torch; it is started when needed, ended when it does not answer, and started again for the
next picture. Every wait has an end. Does not import torch, does not know files or requests.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from hydra_engine.core.ids import ImageDigest
from hydra_engine.core.media import ArrayLayout, PixelPayload
from hydra_engine.errors import EngineClosed, InvalidImage, Unavailable, from_info
from hydra_engine.intake.processor_child import Ask, Reply, Setup, receive, send
from hydra_engine.intake.spawn import SpawnedChild, fill, spawn
from hydra_engine.specs.base import ItemPlan, MediaPlan, View
from hydra_engine.specs.generic import SPAN_TOKEN_IDS, GenericSpec, GenericVisionSpec

logger = logging.getLogger(__name__)

START_SECONDS = 180.0  # torch and transformers on a busy machine
ANSWER_SECONDS = 60.0  # for a picture
MAX_ARRAY_BYTES = 1 << 30  # of one picture's arrays

_FOLDERS = ("HOME", "TMPDIR", "HF_HOME", "HF_MODULES_CACHE")  # where transformers keeps code that comes with models
_SETTINGS = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_COMMAND = (sys.executable, "-m", "hydra_engine.intake.processor_child")


@dataclass(frozen=True, slots=True)
class ProcessedPicture(PixelPayload):
    """A payload, with what the prompt needs of it."""

    before: str = ""
    behind: str = ""
    num_tokens: int = 0
    num_patches: int = 0
    whole: bool = False

    def plan(self) -> MediaPlan:
        """Text, the span, text."""
        item = ItemPlan(
            self.width, self.height, 1, self.num_patches, self.num_tokens, (1, 1, self.num_patches), whole=self.whole
        )
        parts = [part for part in (self.before, item, self.behind) if part != ""]
        return MediaPlan((View.whole(self.width, self.height),), tuple(parts))


class ProcessorHost:
    """Safe from any thread; pictures go through one after another."""

    def __init__(
        self, spec: GenericSpec, command: Sequence[str] = _COMMAND, answer_seconds: float = ANSWER_SECONDS
    ) -> None:
        assert isinstance(spec.vision, GenericVisionSpec)
        facts = spec.vision.facts
        setup = Setup(
            spec.model_dir,
            facts.model_type,
            facts.image_token_id,
            facts.inputs,
            facts.patch_size,
            spec.trust_remote_code,
        )
        self._whole = facts.whole
        self._command = tuple(command)
        self._setup = msgspec.json.encode(setup).decode()
        self._answer_seconds = answer_seconds
        self._child: _Child | None = None
        self._turn = threading.Lock()
        self._closed = False

    def process(self, digest: ImageDigest, size: tuple[int, int], pixels: bytes) -> ProcessedPicture:
        """Blocking. An upright RGB picture of that (width, height), row by row. Raises InvalidImage where the processor
        refuses it or fails on it, Unavailable when no child can be started."""
        with self._turn:
            child = self._running()
            try:
                reply, data = child.ask(Ask(*size), pixels, self._answer_seconds)
            except (OSError, EOFError, msgspec.MsgspecError) as error:  # timeouts are OSErrors too
                self._child = None
                logger.warning("the processor's process ended with status %s", child.end())
                if self._closed:
                    raise _closed() from error
                raise InvalidImage("the picture cannot be used: the model's processor failed on it") from error
        if reply.error is not None:
            raise from_info(reply.error)
        ids = np.asarray(reply.token_ids, dtype=np.int64)
        layouts = (ArrayLayout(SPAN_TOKEN_IDS, ids.dtype.str, ids.shape), *reply.arrays)
        return ProcessedPicture(
            digest,
            width=size[0],
            height=size[1],
            data=ids.tobytes() + data,
            arrays=layouts,
            before=reply.before,
            behind=reply.behind,
            num_tokens=ids.size,
            num_patches=reply.num_patches,
            whole=self._whole,
        )

    def warm_up(self) -> None:
        """Blocking. Starts the child, so that the first picture does not wait for it."""
        with self._turn:
            self._running()

    def close(self) -> None:
        """Ends the child now, whatever it does."""
        self._closed = True
        child = self._child
        if child is not None:
            child.end()

    def _running(self) -> _Child:
        if self._closed:
            raise _closed()
        if self._child is not None and not self._child.is_alive:
            self._child.end()
            self._child = None
        if self._child is None:
            try:
                self._child = _Child(self._command, self._setup)
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                raise Unavailable("the model's processor could not be started; try again later") from error
            if self._closed:  # by another thread, which saw no child
                self._child.end()
                raise _closed()
        return self._child


class _Child(SpawnedChild):
    def __init__(self, command: Sequence[str], setup: str) -> None:
        super().__init__(spawn(command, setup, settings=_SETTINGS, kept=_FOLDERS))
        try:
            reply, _ = self._reply(START_SECONDS)
        except (OSError, EOFError, msgspec.MsgspecError):
            self.end()
            raise
        if reply.error is not None:
            self.end()
            raise from_info(reply.error)

    def ask(self, ask: Ask, pixels: bytes, seconds: float) -> tuple[Reply, bytes]:
        """The reply and the bytes of its arrays. Raises OSError, EOFError or MsgspecError when the child is broken."""
        self._socket.settimeout(seconds)
        send(self._socket, ask, (pixels,))
        return self._reply(seconds)

    def _reply(self, seconds: float) -> tuple[Reply, bytes]:
        self._socket.settimeout(seconds)
        head = receive(self._socket)
        if head is None:
            raise EOFError
        reply = msgspec.msgpack.decode(head, type=Reply)
        size = sum(math.prod(layout.shape) * np.dtype(layout.dtype).itemsize for layout in reply.arrays)
        if size > MAX_ARRAY_BYTES:
            raise EOFError
        data = bytearray(size)
        if not fill(self._socket, memoryview(data)):
            raise EOFError
        return reply, bytes(data)


def _closed() -> EngineClosed:
    return EngineClosed("the engine was closed before the request was read")

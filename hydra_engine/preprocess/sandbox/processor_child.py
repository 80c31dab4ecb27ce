"""The processor child: `hydra_engine.preprocess.sandbox.processor_child FD SETUP` runs a model's processor.

It needs torch and transformers, which the frontend process does not import; with --trust-remote-code it runs the
model's own code. It receives decoded pixels only, never untrusted files.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pkgutil import resolve_name

import msgspec
from PIL import Image

from hydra_engine.core.messages import ArrayLayout
from hydra_engine.errors import ErrorInfo, HydraError
from hydra_engine.models.specs.base import PictureProcessor, ProcessorSpec
from hydra_engine.preprocess.sandbox.child_loop import Memory, serve


class Picture(msgspec.Struct):
    """An upright RGB picture, uint8, row-major."""

    width: int
    height: int
    pixels: memoryview


class Processed(msgspec.Struct):
    """A processed picture. `prefix`, `token_ids`, `suffix` replace its placeholder. `data`: the bytes of each array."""

    error: ErrorInfo | None = None
    prefix: str = ""
    token_ids: list[int] = []
    suffix: str = ""
    num_patches: int = 0
    grid: tuple[int, int] = (0, 0)
    arrays: tuple[ArrayLayout, ...] = ()
    data: tuple[memoryview, ...] = ()


def main() -> None:
    serve(msgspec.msgpack.Decoder(Picture), start)


def start() -> Callable[[Picture, Memory], Processed]:
    spec = msgspec.json.decode(sys.argv[2], type=ProcessorSpec)
    gc.disable()
    # Imports torch and transformers, as a rule.
    load: Callable[[ProcessorSpec], PictureProcessor] = resolve_name(spec.loader)
    gc.freeze()  # the imports hold no garbage to look for
    gc.enable()
    processor = load(spec)

    def answer(picture: Picture, _memory: Memory) -> Processed:
        try:
            expansion = processor.expand(Image.frombytes("RGB", (picture.width, picture.height), picture.pixels))
        except HydraError as error:
            return Processed(error.info())
        arrays = expansion.arrays
        return Processed(
            None,
            expansion.prefix,
            expansion.token_ids,
            expansion.suffix,
            expansion.num_patches(spec.patch_size),
            expansion.grid,
            tuple(ArrayLayout(name, array.dtype.str, array.shape) for name, array in arrays.items()),
            tuple(array.data.cast("B") for array in arrays.values()),
        )

    return answer


if __name__ == "__main__":
    main()

"""The processor child: `python -m hydra_engine.intake.processor_child FD SETUP` runs a model's own processor.

It needs torch and transformers, which the front process stays free of; and with --trust-remote-code it runs the code
that comes with the model. It sees decoded pixels alone, never what a stranger sent, and ends when its socket closes.
Frames in both directions are a length, a msgpack head and raw bytes.
"""

from __future__ import annotations

import gc
import resource
import signal
import socket
import struct
import sys
from pathlib import Path

import msgspec
from PIL import Image

from hydra_engine.core.media import ArrayLayout
from hydra_engine.errors import ErrorInfo, HydraError
from hydra_engine.intake.spawn import fill

LENGTH = struct.Struct("<Q")


class Setup(msgspec.Struct):
    """What the child is started with, as JSON."""

    model_dir: str
    model_type: str
    image_token_id: int
    inputs: tuple[str, ...]
    patch_size: int
    trust_remote_code: bool


class Ask(msgspec.Struct):
    """An upright RGB picture; its pixels follow, width * height * 3 bytes, row by row."""

    width: int
    height: int


class Reply(msgspec.Struct):
    """To a picture, and once without one when the processor is loaded. The arrays' bytes follow one another behind it.
    `before`, `token_ids`, `behind` take the place of the picture's placeholder."""

    error: ErrorInfo | None = None
    before: str = ""
    token_ids: list[int] = []
    behind: str = ""
    num_patches: int = 0
    arrays: tuple[ArrayLayout, ...] = ()


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # draining is the parent's business; its end closes the socket
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = msgspec.json.decode(sys.argv[2], type=Setup)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection, setup)


def serve(connection: socket.socket, setup: Setup) -> None:
    gc.disable()
    from hydra_engine.specs.hf_processor import PictureProcessor  # torch and transformers; the parent imports this file

    gc.freeze()  # in what was read there is no garbage, so nobody looks for it
    gc.enable()
    try:
        processor = PictureProcessor(
            Path(setup.model_dir),
            setup.model_type,
            image_token_id=setup.image_token_id,
            inputs=setup.inputs,
            trust_remote_code=setup.trust_remote_code,
        )
    except HydraError as error:
        send(connection, Reply(error=error.info()), ())
        return
    send(connection, Reply(), ())
    while (head := receive(connection)) is not None:
        ask = msgspec.msgpack.decode(head, type=Ask)
        pixels = bytearray(ask.width * ask.height * 3)
        if not fill(connection, memoryview(pixels)):
            return
        try:
            found = processor.expand(Image.frombytes("RGB", (ask.width, ask.height), bytes(pixels)))
        except HydraError as error:
            send(connection, Reply(error=error.info()), ())
            continue
        layouts = tuple(ArrayLayout(name, array.dtype.str, array.shape) for name, array in found.arrays.items())
        reply = Reply(None, found.before, found.token_ids, found.behind, found.num_patches(setup.patch_size), layouts)
        send(connection, reply, tuple(array.data.cast("B") for array in found.arrays.values()))


def send(connection: socket.socket, head: msgspec.Struct, more: tuple[bytes | memoryview, ...]) -> None:
    data = msgspec.msgpack.encode(head)
    connection.sendall(LENGTH.pack(len(data)) + data)
    for piece in more:
        connection.sendall(piece)


def receive(connection: socket.socket) -> bytes | None:
    """A head; None when the other side has gone."""
    length = bytearray(LENGTH.size)
    if not fill(connection, memoryview(length)):
        return None
    data = bytearray(LENGTH.unpack(length)[0])
    return bytes(data) if fill(connection, memoryview(data)) else None


if __name__ == "__main__":
    main()

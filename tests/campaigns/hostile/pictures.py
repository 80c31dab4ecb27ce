"""Pictures that are none, too large or damaged, and addresses that lead nowhere good."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from typing import Any

from hydra_engine.config.engine import DEFAULT_IMAGES
from tests.campaigns.hostile.case import BODIES, CHAT, EITHER, MAIN, REFUSED, RESPONSES, Made, as_json


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes = b"", *, depth: int = 8, colour: int = 2) -> bytes:
    """`data`: the compressed rows, for a picture that has as many as its header says; else none follow."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _bomb(rng: random.Random) -> bytes:
    side = rng.choice([65_535, 30_000, 13_300])
    one_bit = zlib.compress(b"\0" * (side // 8 + 1), 9)
    return rng.choice(
        [
            png(side, side),
            png(side, side, one_bit, depth=1, colour=0),
            png((1 << 31) - 1, (1 << 31) - 1),
            b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + b"\x80\0\0" + b"\0" * 6 + b",",
            b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, side, side, 1, 24, *[0] * 6),
            b"RIFF"
            + struct.pack("<I", 30)
            + b"WEBPVP8X"
            + struct.pack("<I", 10)
            + b"\0\0\0\0"
            + b"\xff" * 6
            + b"\0" * 12,
        ]
    )


def noise(rng: random.Random, width: int, height: int) -> bytes:
    """A right one."""
    rows = b"".join(b"\0" + rng.randbytes(3 * width) for _ in range(height))
    return png(width, height, zlib.compress(rows))


def _picture(rng: random.Random) -> bytes:
    return noise(rng, rng.randint(1, 64), rng.randint(1, 64))


def _with_picture(rng: random.Random, url: str) -> bytes:
    path = rng.choice((CHAT, RESPONSES))
    image: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    if path == RESPONSES:
        image = {"type": "input_image", "image_url": url}
    messages = [{"role": "user", "content": [image]}]
    return as_json(path, BODIES[path] | {MAIN[path]: messages})


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def bombs(rng: random.Random) -> Made:
    return _with_picture(rng, data_url(_bomb(rng))), REFUSED


def truncated(rng: random.Random) -> Made:
    data = _picture(rng)
    return _with_picture(rng, data_url(data[: rng.randrange(len(data) - 20)])), REFUSED


def damaged(rng: random.Random) -> Made:
    data = bytearray(_picture(rng))
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return _with_picture(rng, data_url(bytes(data))), EITHER


def wrong_base64(rng: random.Random) -> Made:
    url = rng.choice(
        [
            "data:image/png;base64,!!!!",
            "data:image/png;base64,AAA",
            "data:image/png;base64,",
            "data:image/png,AAAA",
            "data:image/png;base64;AAAA",
            "data:,",
            "data:image/png;base64,AA AA\n",
            data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"),
            data_url(b"<html></html>", "text/html"),
            data_url(b"%PDF-1.7", "application/pdf"),
            data_url(rng.randbytes(200)),
        ]
    )
    return _with_picture(rng, url), REFUSED


def urls(rng: random.Random) -> Made:
    url = rng.choice(
        [
            *(
                "http://127.0.0.1:1/x.png",
                "http://[::1]/x.png",
                "http://0/x.png",
                "http://2130706433/",
                "http://0x7f.1/",
            ),
            *("http://169.254.169.254/latest", "http://10.0.0.1/a.png", "http://user:word@127.0.0.1/", "gopher://a/"),
            *("file:///etc/hostname", "ftp://a/b.png", "http://", "//127.0.0.1/x", "x" * 9000, "", "/etc/passwd"),
            *("http://[::ffff:127.0.0.1]/", "http://127.0.0.1:22/", "http://localhost/x.png", "javascript:1"),
        ]
    )
    return _with_picture(rng, url), REFUSED


def odd_shapes(rng: random.Random) -> Made:
    width, height = rng.choice([(20_000, 1), (1, 20_000), (201, 1), (0, 5), (5, 0)])
    return _with_picture(rng, data_url(png(width, height, zlib.compress(b"\0" * (height * (3 * width + 1)))))), REFUSED


def many_pictures(rng: random.Random) -> Made:
    url = rng.choice(["http://127.0.0.1:1/x.png", data_url(_picture(rng))])
    part = {"type": "image_url", "image_url": {"url": url}}
    content = [part] * rng.choice([DEFAULT_IMAGES + 1, 1000, 1025])
    return as_json(CHAT, BODIES[CHAT] | {"messages": [{"role": "user", "content": content}]}), REFUSED

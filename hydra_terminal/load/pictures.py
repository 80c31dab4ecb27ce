"""Pictures from a seed: smooth noise, shapes and grain, as JPEG. No two have equal bytes: no cache helps by chance.

The grain keeps a file about as large as a camera's; `bench/workload.py` has the pictures of the closed-loop benchmarks.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageDraw

_QUALITY = 85
_SHAPES = 12


def jpeg(width: int, height: int, seed: int) -> bytes:
    """Equal arguments give equal bytes (of one version of Pillow)."""
    rng = np.random.default_rng([seed, width, height])
    coarse = rng.integers(0, 256, (height // 32 + 2, width // 32 + 2, 3), dtype=np.uint8)
    picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
    draw = ImageDraw.Draw(picture)
    for _ in range(_SHAPES):
        x, y = int(rng.integers(width)), int(rng.integers(height))
        r = int(rng.integers(4, max(min(width, height) // 4, 5)))
        colour = tuple(int(value) for value in rng.integers(0, 256, 3))
        if rng.random() < 0.5:
            draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        else:
            draw.rectangle((x - r, y - r // 2, x + r, y + r // 2), fill=colour)
    pixels = np.asarray(picture).astype(np.int16)
    pixels += rng.integers(-8, 9, (height, width, 1), dtype=np.int16)
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()

"""Folder of compiled kernels, kept between runs; an entry's key covers its source, its types and the compiler."""

import os
from pathlib import Path

os.environ.setdefault("TRITON_CACHE_DIR", str(Path(__file__).parents[2] / "build" / "triton"))

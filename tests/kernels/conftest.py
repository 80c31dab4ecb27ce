"""Where compiled kernels are kept between runs; the key of an entry covers its source, its types and the compiler."""

import os
from pathlib import Path

os.environ.setdefault("TRITON_CACHE_DIR", str(Path(__file__).parents[2] / "build" / "triton"))

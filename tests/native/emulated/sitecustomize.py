"""Makes the emulated extension `hydra_engine._C` for every Python with this folder in PYTHONPATH, see setup.py."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

BUILT = Path(__file__).parents[3] / "build" / "emulated" / "hydra_engine"
LIBRARY = BUILT / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


class Emulated(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(fullname, LIBRARY) if fullname == "hydra_engine._C" else None


sys.meta_path.insert(0, Emulated())

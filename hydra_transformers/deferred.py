"""Leaves out of an import of transformers what only training and compiled models use: torch's compiler, and tensors
that are spread over processes. They take a second of a core and 150 MB.

Only for processes of the engine's own: `leave_out` changes modules of torch and transformers for all code in a process.
It comes before the import of transformers. What it does not find in other versions is imported as ever.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
# Its decorators that modules of transformers use; they change nothing in functions that are never compiled.
_DECORATORS = ("allow_in_graph", "assume_constant_result", "disable")
_ALONE = "._trace_wrapped_higher_order_op"  # what transformers imports of it, which needs nothing else of it
_lock = threading.RLock()
_loading = False


class _Deferred(ModuleType):
    """A package that runs its own code when something else than a decorator is asked of it, a submodule for example."""

    def __getattr__(self, name: str) -> Any:
        global _loading
        if name in _DECORATORS and not _loading:
            return _unchanged
        if name == "__path__" or not name.startswith("__"):
            with _lock:  # held while it runs, so that no other thread sees half of it
                if type(self) is _Deferred and not _loading:
                    _loading = True
                    try:
                        _run(self)
                    finally:
                        _loading = False
                    return getattr(self, name)
        return object.__getattribute__(self, name)


def _run(module: ModuleType) -> None:
    spec = module.__spec__
    assert spec is not None and spec.loader is not None and spec.submodule_search_locations is not None
    module.__path__ = spec.submodule_search_locations
    spec.loader.exec_module(module)
    module.__class__ = ModuleType


def _unchanged(function: Any = None, *_: object, **__: object) -> Any:
    """Returns the decorated function itself, or this decorator if it is called with settings alone."""
    return _unchanged if function is None else function


def leave_out() -> None:
    """Defers torch's compiler, tells transformers that this torch has no `torch.distributed`, and lets it look through
    the files of its models once instead of twice."""
    _defer_compiler()
    import transformers

    utils: Any = transformers.utils
    utils.is_torch_distributed_available = utils.import_utils.is_torch_distributed_available = _is_available
    find = getattr(utils.import_utils, "create_import_structure_from_path", None)
    if find is not None:
        utils.import_utils.create_import_structure_from_path = _of_folder(find)


def _defer_compiler() -> None:
    spec = find_spec(_COMPILER)
    if spec is None or _COMPILER in sys.modules:
        return
    module = module_from_spec(spec)
    sys.modules[_COMPILER] = module
    with suppress(ModuleNotFoundError):  # of another torch
        import_module(_COMPILER + _ALONE)
    del module.__path__
    module.__class__ = _Deferred


def _is_available() -> bool:
    return False


def _of_folder(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a cached function of a path that takes the folder of a file, which it stands for, so that both are one
    entry of the cache."""
    return lambda path: find(Path(path).parent if os.path.isfile(path) else path)

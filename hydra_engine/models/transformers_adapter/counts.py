"""Limits on what transformers may build for a checkpoint: no more layers, nor other modules, than its tensors can be
of.

A decoder and a tower are counted before anything is built; all else that a config multiplies is counted while
transformers builds. Knows names of tensors and transformers' configs; reads no files.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from hydra_engine.errors import CheckpointError
from hydra_engine.models.specs.held_layers import too_many_layers

_NUMBERED = re.compile(r"(.+?)\.(0|[1-9][0-9]{0,8})\.")
_TOWERS = re.compile(r"vis(ion|ual)|image|audio")  # in names of lists that are no decoder's
_FIELDS = ("num_hidden_layers", "depth")
# Modules for each tensor, and in any case: those without tensors, and models whose files keep many modules' in one.
_PER_TENSOR, _FREE = 8, 10_000


def check_counts(config: Any, names: Collection[str]) -> None:
    """Raises CheckpointError if the decoder or a tower has more layers than any module list in the weights."""
    lists: dict[str, set[int]] = {}
    for found in filter(None, map(_NUMBERED.match, names)):
        lists.setdefault(found[1], set()).add(int(found[2]))
    most = max(map(len, lists.values()), default=0)
    towers = [name for name in lists if _TOWERS.search(name)]
    parts = [(config.get_text_config(decoder=True), [name for name in lists if not _TOWERS.search(name)])]
    parts += [(getattr(config, name, None), towers) for name in type(config).sub_configs if "vision" in name]
    for part, own in parts:
        for field in _FIELDS:
            count = getattr(part, field, None)
            if type(count) is int and count > most:
                named = max(own or lists, default="layers", key=lambda name: len(lists[name]))
                raise too_many_layers(count, field, named[:120], lists.get(named, ()))


@contextmanager
def bounded_modules(num_tensors: int) -> Iterator[None]:
    """Limits, on this thread, the number of modules built to what `num_tensors` tensors may belong to. Raises
    CheckpointError beyond that."""
    most, built, thread = _FREE + _PER_TENSOR * num_tensors, 0, threading.get_ident()

    def count(_module: nn.Module, _name: str, _part: nn.Module | None) -> None:
        nonlocal built
        if threading.get_ident() == thread:
            built += 1
            if built > most:
                raise CheckpointError(
                    f"config.json describes more than {most} modules, and the weights hold {num_tensors} tensors; use "
                    "the config.json that came with the weights"
                )

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()

"""Compares the number of layers in a checkpoint's tensor names with the number in its config.json."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from hydra_engine.errors import CheckpointError

_NUMBER = re.compile(r"(0|[1-9][0-9]{0,8})\.")
_SHOWN = 4  # runs of layers


def check_held(names: Collection[str], stack: str, count: int, said_by: str) -> None:
    """Raises CheckpointError if the weights have fewer than `count` layers below `stack`. `said_by` is the field of
    config.json with that count. Distinct layer numbers are counted, so that two names cannot stand for a thousand
    layers. If no layer is found, the tensors may have other names; then the list of missing tensors, made elsewhere,
    says more, so this raises only if `count` exceeds the number of tensors."""
    begin = f"{stack}."
    numbers = (_NUMBER.match(name, len(begin)) for name in names if name.startswith(begin))
    held = {int(number[1]) for number in numbers if number is not None}
    if len(held) < count and (held or count > len(names)):
        raise too_many_layers(count, said_by, stack, held)


def too_many_layers(count: int, said_by: str, stack: str, held: Iterable[int]) -> CheckpointError:
    numbers = sorted(held)
    there = f"{len(numbers)} ({stack}.{_runs(numbers)})" if numbers else f"none (there is no {stack}.0)"
    return CheckpointError(
        f"config.json names {count} layers ({said_by}), the weights hold {there}; use the config.json that came with "
        "the weights"
    )


def _runs(numbers: Iterable[int]) -> str:
    """Formats ascending numbers as "0 to 4, 6 to 9"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in runs[:_SHOWN]]
    return ", ".join(shown) + (", .." if len(runs) > _SHOWN else "")

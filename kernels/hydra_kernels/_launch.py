"""Launches without most of what Triton does in Python for each: binding names, a key of all arguments and constants as
text, a lookup. That takes it 10 us and more; a step of decodes launches some hundred kernels.

What a launch was compiled to is kept with its constants. It is found again by what Triton specialises for, which is no
more than the dtype of a tensor and whether its address is a multiple of 16, whether an integer is 1, a multiple of 16
or long, and what is None. Constants are kept too, by `kept` functions that make them from shapes, strides and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from torch import Tensor
from triton import JITFunction
from triton.runtime import driver

Makes = TypeVar("Makes", bound=Callable[..., Any])
_forget: list[Callable[[], None]] = []


def kept(function: Makes) -> Makes:
    """Of functions that make a `Launch`: one entry for each kind of call that a process makes."""
    cached = lru_cache(maxsize=4096)(function)
    _forget.append(cached.cache_clear)
    return cached  # type: ignore[return-value]  # takes and returns what `function` does


def forget() -> None:
    """All that is kept: what it was made from has changed, as it does in tests and benchmarks alone."""
    for clear in _forget:
        clear()


_ALIGNED, _UNALIGNED = "D", ""


class Launch:
    """Launches of kernels whose last parameters are `constants`, with these and with options of launches."""

    __slots__ = ("_compiled", "constants")

    def __init__(self, **constants: Any) -> None:
        self.constants = constants
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, kernel: Any, grid: tuple[int, int, int], *arguments: Any) -> None:
        """What `kernel[grid](*arguments, **constants)` does, but that hooks of Triton hear only of the first launch.
        Tensors, of which the first argument is one, lie on the current device."""
        device = arguments[0].get_device()
        if device < 0 or not isinstance(kernel, JITFunction):  # on the host: interpreted, emulated, or an error
            kernel[grid](*arguments, **self.constants)
            return
        kinds: list[Any] = [device, id(kernel)]
        values: list[Any] = []
        add_kind, add_value = kinds.append, values.append  # looked up once, not for every argument
        for argument in arguments:
            if isinstance(argument, Tensor):
                address = argument.data_ptr()
                add_value(address)
                add_kind(argument.dtype)
                add_kind(_UNALIGNED if address & 15 else _ALIGNED)
                continue
            add_value(argument)
            if isinstance(argument, int) and argument != 1 and not argument >> 31:
                add_kind(_UNALIGNED if argument & 15 else _ALIGNED)
            else:
                add_kind(argument)  # the numbers that are left hardly ever change
        key = tuple(kinds)
        found = self._compiled.get(key)
        if found is None:
            compiled = kernel[grid](*arguments, **self.constants)
            if compiled is not None:  # else nothing was launched
                rest = kernel.arg_names[len(arguments) :]
                self._compiled[key] = compiled, tuple([self.constants[name] for name in rest])
            return
        compiled, constants = found
        stream = driver.active.get_current_stream(device)
        # As in JITFunction.run. A number in place of a tensor is its address.
        compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *values, *constants)

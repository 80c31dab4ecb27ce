"""Kernel launches without most of Triton's Python work: it binds names, builds a key and looks it up, in 10 us or more;
a decode step launches some hundred kernels.

The compiled kernel of a launch is kept with its constants, and found again by what Triton specialises for: the dtype of
a tensor and whether its address is a multiple of 16; whether an integer is 1, a multiple of 16, or 64-bit; and what is
None. Constants are kept too, by `cached_launch` functions that make them from shapes, strides and dtypes.
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


def cached_launch(function: Makes) -> Makes:
    """Decorates a function that makes a `Launch`: results are cached by arguments, the 4096 used last."""
    cached = lru_cache(maxsize=4096)(function)
    _forget.append(cached.cache_clear)
    return cached  # type: ignore[return-value]  # takes and returns what `function` does


def clear_launch_caches() -> None:
    """Clears the caches of all `cached_launch` functions; for tests and benchmarks, which change what launches are made
    from."""
    for clear in _forget:
        clear()


_ALIGNED, _UNALIGNED = "D", ""


class Launch:
    """Launches kernels with these constants, which are their last parameters, and launch options such as `num_warps`.
    Keeps the compiled kernels."""

    __slots__ = ("_compiled", "constants")

    def __init__(self, **constants: Any) -> None:
        self.constants = constants
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, kernel: Any, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Does what `kernel[grid](*arguments, **constants)` does on the current stream, but Triton's hooks see only the
        first launch of each kind of arguments.

        The first argument is a tensor; tensors are on the current device. On the host Triton gets the call as it
        is, to interpret it.
        """
        device = arguments[0].get_device()
        if device < 0 or not isinstance(kernel, JITFunction):  # on the host: interpreted, emulated, or an error
            kernel[grid](*arguments, **self.constants)
            return
        kinds: list[Any] = [device, id(kernel)]
        values: list[Any] = []
        add_kind, add_value = kinds.append, values.append  # one lookup, not one per argument
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
                add_kind(argument)  # other values hardly ever change
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
        # As in JITFunction.run. Tensors are passed as addresses.
        compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *values, *constants)

"""Sizes of launches, on the host: `triton.cdiv` and `triton.next_power_of_2` are made for kernels too, and take as long
as a launch."""

from __future__ import annotations


def cdiv(size: int, part: int) -> int:
    """How many parts cover it."""
    return -(-size // part)


def next_power_of_2(size: int) -> int:
    """The least that is not less; 1 of nothing."""
    return 1 << max(0, size - 1).bit_length()

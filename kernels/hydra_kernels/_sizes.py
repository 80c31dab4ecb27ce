"""Launch sizes on the host: `triton.cdiv` and `triton.next_power_of_2` also serve kernels, and take as long as a
launch."""

from __future__ import annotations


def cdiv(size: int, part: int) -> int:
    """size / part, rounded up."""
    return -(-size // part)


def next_power_of_2(size: int) -> int:
    """The least power of two >= size; 1 for 0."""
    return 1 << max(0, size - 1).bit_length()

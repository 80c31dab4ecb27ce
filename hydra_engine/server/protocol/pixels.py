"""`mm_processor_kwargs`: limits for the number of pixels of each picture of a request."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hydra_engine.core.prompting import MAX_PIXELS, PixelBudget
from hydra_engine.errors import InvalidRequest

ProcessorSettings = Annotated[dict[str, Any], Meta(max_length=16)]
PixelCount = Annotated[int, Meta(ge=1, le=MAX_PIXELS)]


class _PixelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    min_pixels: PixelCount | None = None
    max_pixels: PixelCount | None = None


def pixel_budget(settings: dict[str, Any] | None) -> PixelBudget:
    """The pixel limits in `mm_processor_kwargs`, which may hold nothing else. Raises InvalidRequest."""
    param = "mm_processor_kwargs"
    names = _PixelSettings.__struct_fields__
    if other := next((name for name in settings or {} if name not in names), None):
        raise InvalidRequest(
            f"{param} may have {' and '.join(names)} only; leave out {other[:64]!r}",
            param=f"{param}.{other[:64]}",
            code="unsupported_parameter",
        )
    try:
        chosen = msgspec.convert(settings or {}, _PixelSettings)
    except msgspec.ValidationError:
        raise InvalidRequest(
            f"{' and '.join(names)} of {param} must be integers from 1 to {MAX_PIXELS}", param=param
        ) from None
    if chosen.min_pixels is not None and chosen.max_pixels is not None and chosen.min_pixels > chosen.max_pixels:
        raise InvalidRequest(f"{param}: min_pixels must not exceed max_pixels", param=f"{param}.min_pixels")
    return PixelBudget(chosen.min_pixels, chosen.max_pixels)

"""What was measured: times of steps by their load, alone and with both lanes busy. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.core.cost import LanguageLoad, VisionLoad


@dataclass(frozen=True, slots=True)
class LanguageTimes:
    """Seconds of language steps of one load that had the machine to themselves."""

    load: LanguageLoad
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class VisionTimes:
    """Seconds of vision steps of one load that had the machine to themselves."""

    load: VisionLoad
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CorunTimes:
    """Both lanes busy all along: seconds of language steps beside which vision steps ran, and of these."""

    language: LanguageLoad
    vision: VisionLoad
    language_s: tuple[float, ...]
    vision_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Samples:
    language: tuple[LanguageTimes, ...] = ()
    vision: tuple[VisionTimes, ...] = ()
    corun: tuple[CorunTimes, ...] = ()

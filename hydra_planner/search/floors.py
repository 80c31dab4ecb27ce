"""The least that a request takes on a device with nothing beside it. No topology keeps a limit below that."""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.core.cost import CostSurface
from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_engine.errors import ConfigError
from hydra_planner.search.measure import SHARE, Question
from hydra_planner.work import Work, works

_SAMPLE = 200


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds of one request alone: its largest encode (others may go side by side), its prefill, one decode step."""

    encode_s: float
    prefill_s: float
    decode_s: float

    @property
    def ttft_s(self) -> float:
        return self.encode_s + self.prefill_s


def floor_of(surface: CostSurface, work: Work) -> Floor:
    encodes = [surface.vision_s(VisionLoad(count, float(count * count))) for count in work.encoded]
    tokens = work.prompt - min(work.cached, work.prompt - 1)
    prefill_s = surface.language_s(LanguageLoad(0, 0, tokens, tokens * (tokens + 1) / 2, 1))
    return Floor(max(encodes, default=0.0), prefill_s, surface.language_s(LanguageLoad(1, work.prompt)))


def check_lengths(question: Question) -> None:
    """Raises ConfigError if requests are longer than what the model takes, which a server refuses."""
    most = question.config.max_model_len or question.spec.max_model_len
    lengths = [work.prompt + work.output for work in works(question.spec, question.rows)]
    if longer := [length for length in lengths if length > most]:
        raise ConfigError(
            f"{len(longer)} of {len(lengths)} requests of the workload have more than the {most} tokens that this "
            f"deployment takes, the longest {max(longer)} with its answer; leave them out, or plan for a longer "
            "--max-model-len or another model",
            param="workload",
        )


def check_reachable(question: Question) -> None:
    """Raises ConfigError where more requests than may miss a limit cannot keep it on the best of these devices,
    naming the stage, by how much, and the device."""
    asked = list(works(question.spec, question.rows[:_SAMPLE]))
    kinds = {kind.name: kind for kind in question.kinds.values()}
    floors = {name: [floor_of(kind.costs.surface, work) for work in asked] for name, kind in kinds.items()}
    limits = question.limits
    for what, flag, limit_s, seconds in (
        ("the time to the first token", "ttft_slo", limits.ttft_s, lambda floor: floor.ttft_s),
        ("the time between tokens", "tpot_slo", limits.tpot_limit_s, lambda floor: floor.decode_s),
    ):
        best = {name: sorted(map(seconds, found))[int(SHARE * (len(found) - 1))] for name, found in floors.items()}
        name = min(best, key=lambda kind: best[kind])
        if best[name] <= limit_s:
            continue
        stage = _stage(sorted(floors[name], key=seconds)[int(SHARE * (len(asked) - 1))], flag)
        raise ConfigError(
            f"no topology keeps {what} within {_time(limit_s)}: on an idle {name} a request of this workload needs "
            f"{_time(best[name])} ({stage}), {best[name] / limit_s:.1f} times as long; raise "
            f"--{flag.replace('_', '-')} or take faster devices",
            param=flag,
        )


def _stage(floor: Floor, flag: str) -> str:
    if flag == "tpot_slo":
        return f"a decode step {_time(floor.decode_s)}"
    return f"encode {_time(floor.encode_s)}, prefill {_time(floor.prefill_s)}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"

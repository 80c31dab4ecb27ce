"""The best latencies that one request alone can have on a measured machine, to find limits that cannot be kept.

Reported at start: no budget can keep a limit that a single request breaks. Does not know what is running.
"""

from __future__ import annotations

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.cost import CostSurface
from hydra_engine.core.plans import LanguageLoad, VisionLoad

SHORT_PROMPT = 64  # tokens of text


def best_tpot_s(surface: CostSurface, *, pause_s: float = 0.0) -> float:
    """Seconds per token of one request whose context is a short prompt. `pause_s`: seconds between two steps."""
    return surface.language_s(LanguageLoad(num_decodes=1, decode_context=SHORT_PROMPT)) + pause_s


def best_ttft_s(
    surface: CostSurface, token_budget: int, *, picture: VisionLoad | None = None, picture_tokens: int = 0
) -> float:
    """Seconds to the first token of a short prompt: its encode, if there is a picture, then its prefill in chunks of
    `token_budget` tokens. `picture_tokens`: tokens of the picture in the prompt."""
    seconds = surface.vision_s(picture) if picture is not None else 0.0
    start, end = 0, SHORT_PROMPT + (picture_tokens if picture is not None else 0)
    while start < end:
        count = min(token_budget, end - start)
        pairs = count * start + count * (count + 1) / 2
        seconds += surface.language_s(LanguageLoad(prefill_tokens=count, prefill_pairs=pairs, num_chunks=1))
        start += count
    return seconds


def check_limits(
    surface: CostSurface,
    config: SchedulerConfig,
    *,
    picture: VisionLoad | None = None,
    picture_tokens: int = 0,
    pause_s: float = 0.0,
) -> list[str]:
    """Messages for the user about limits that not even a single request keeps; empty if all can be kept.

    `picture`: the largest picture of the model, None if it takes none; `picture_tokens`: its tokens in a prompt;
    `pause_s`: seconds between two steps.
    """
    problems = []
    if config.tpot_slo is not None:
        best = best_tpot_s(surface, pause_s=pause_s)
        if best > config.tpot_slo:
            problems.append(
                f"tpot_slo {_text(config.tpot_slo)} cannot be kept here: "
                f"one request alone takes {_text(best)} per token"
            )
    if config.ttft_slo is not None:
        best = best_ttft_s(surface, config.max_step_tokens)
        if best > config.ttft_slo:
            problems.append(
                f"ttft_slo {_text(config.ttft_slo)} cannot be kept here: "
                f"a prompt of {SHORT_PROMPT} tokens alone takes {_text(best)}"
            )
        elif picture is not None:
            best = best_ttft_s(surface, config.max_step_tokens, picture=picture, picture_tokens=picture_tokens)
            if best > config.ttft_slo:
                problems.append(
                    f"ttft_slo {_text(config.ttft_slo)} cannot be kept for the largest picture: "
                    f"with {picture.num_patches} patches it alone takes {_text(best)}"
                )
    return problems


def _text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"

"""Default limits of a language step on an asynchronous device: tokens and requests at once.

Tokens follow from waves of tiles. A large product is cut into tiles of 128 x 256 results, one for each multiprocessor
at a time, and the last wave of them is seldom full: of LLaVA-1.5-7B 0.67 of the places have a tile with 512 tokens and
0.96 with 2048 (Qwen2-VL-7B 0.63 and 0.92). So a step has 2048 tokens where that fills 0.9 of the places, else 4096,
which smaller models need and compute as fast. More would gain little and make decodes beside prompts wait longer.

Requests at once are 256: decodes read all weights whether they are 64 or 256, so that tokens a second rise with them
until products are bound by arithmetic, at 180 to 190 rows of an H200. Both are halved down to the limits of a processor
while the memory of the instance does not hold them. Estimates from the spec; asks no device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hydra_engine.config import DEFAULT_REQUESTS, DEFAULT_TOKENS, EngineConfig, SchedulerConfig
from hydra_engine.core.instances import Role
from hydra_engine.models.specs.base import LanguageSpec, ModelSpec
from hydra_engine.worker.memory.plan import MARGIN_BYTES, Needs
from hydra_engine.worker.memory.working import estimate

TOKENS, REQUESTS = (2048, 4096), 256
FULL = 0.9  # `filled_places` that suffice
STEPS_SHARE = 0.125  # of what weights leave: what larger limits may take, of working memory and recurrent states
MIN_CONTEXT = 256  # tokens of KV for each request: with fewer, most of them would only wait for blocks
_TILE_ROWS, _TILE_COLUMNS = 128, 256
_MULTIPROCESSORS = 132  # of an H100 or H200; others have 108 to 148, for which the shares are alike


def filled_places(language: LanguageSpec, num_tokens: int) -> float:
    """Share of the multiprocessors' time slots that compute a tile, over the products of a layer with `num_tokens`
    rows. A wave is one tile of 128 x 256 results for each multiprocessor; the last wave of a product is seldom full."""
    hidden, inner, heads = language.hidden_size, language.intermediate_size, language.num_heads * language.head_dim
    keys, num_experts, rows = 2 * language.num_kv_heads * language.head_dim, 1, num_tokens
    if (mixture := language.mixture) is not None:  # alike in all layers, and tokens in all experts
        num_experts, inner = mixture.num_held, mixture.num_inner
        rows = -(-num_tokens * mixture.num_active // mixture.num_held)
    mixers, mlp = ((heads + keys, hidden), (hidden, heads)), ((2 * inner, hidden), (hidden, inner))
    products = [(1, num_tokens, *shape) for shape in mixers] + [(num_experts, rows, *shape) for shape in mlp]
    tiled = waves = 0
    for count, height, outputs, inputs in products:
        tiles = count * -(-height // _TILE_ROWS) * -(-outputs // _TILE_COLUMNS)
        tiled += tiles * inputs
        waves += -(-tiles // _MULTIPROCESSORS) * inputs
    return tiled / (waves * _MULTIPROCESSORS)


def with_limits(
    config: EngineConfig, spec: ModelSpec, role: Role, dtype_bytes: int, own_bytes: int, weight_bytes: int | None
) -> tuple[EngineConfig, str | None]:
    """Returns the configuration with `token_budget` and `max_num_seqs`, where not configured the largest that fit the
    memory or else the defaults, and a note for the user on those that were chosen here. Unchanged, and no note, if both
    are configured or the role has no language steps. `own_bytes`: the instance's part of the device. `dtype_bytes`:
    bytes of an activation; `weight_bytes`: of a weight, if fewer."""
    given = config.scheduler
    if not role.needs_language or (given.token_budget is not None and given.max_num_seqs is not None):
        return config, None
    of = Needs(spec, role, config, dtype_bytes, weight_bytes), own_bytes
    limits = next((limits for limits in _candidates(given, spec.language) if _holds(*of, limits)), given)
    tokens, requests = limits.max_step_tokens, limits.max_running_requests
    said = [f"{tokens} tokens a language step"] if given.token_budget is None else []
    said += [f"{requests} requests at once"] if given.max_num_seqs is None else []
    resolved = replace(given, token_budget=tokens, max_num_seqs=requests)
    return replace(config, scheduler=resolved), f"{' and '.join(said)}, from the device's memory"


def _candidates(given: SchedulerConfig, language: LanguageSpec) -> Iterator[SchedulerConfig]:
    """Yields settings with both limits, the largest first; configured limits stay. Lowers requests before tokens, since
    tokens give prompts their full speed."""
    all_tokens = [given.max_step_tokens]
    if given.token_budget is None:
        best = next((count for count in TOKENS if filled_places(language, count) >= FULL), TOKENS[-1])
        all_tokens = [*_halved(best, DEFAULT_TOKENS)]
    # No step has more rows than tokens.
    most = min(REQUESTS, max(all_tokens[0], DEFAULT_REQUESTS))
    requests = [*_halved(most, DEFAULT_REQUESTS)] if given.max_num_seqs is None else [given.max_running_requests]
    for tokens in all_tokens:
        for count in requests:
            yield replace(given, token_budget=tokens, max_num_seqs=count)


def _halved(most: int, least: int) -> Iterator[int]:
    """Yields `most` and its halves above `least`, then `least`."""
    while most > least:
        yield most
        most //= 2
    yield least


def _holds(needs: Needs, own_bytes: int, limits: SchedulerConfig) -> bool:
    """True if these limits fit `own_bytes`, the instance's part of the device: what their steps need beyond the steps
    of the default limits is at most STEPS_SHARE of what weights leave, and each request has MIN_CONTEXT tokens of KV.
    The latter is not asked of the default or of a configured number of requests."""
    left_bytes = own_bytes - sum(needs.weights) - MARGIN_BYTES
    least = replace(limits, token_budget=DEFAULT_TOKENS, max_num_seqs=DEFAULT_REQUESTS)
    larger, smaller = (replace(needs, config=replace(needs.config, scheduler=each)) for each in (limits, least))
    if _steps_bytes(larger) - _steps_bytes(smaller) > STEPS_SHARE * max(left_bytes, 0):
        return False
    if limits.max_running_requests == DEFAULT_REQUESTS or needs.config.scheduler.max_num_seqs is not None:
        return True  # there are no fewer to take
    kv_bytes = left_bytes - _steps_bytes(larger) - larger.usual_cache_bytes + larger.state_bytes
    given = larger.configured_blocks("kv", larger.kv_block_bytes)
    num_blocks = max(kv_bytes, 0) // larger.kv_block_bytes if given is None else given
    return num_blocks * needs.config.cache.block_size >= MIN_CONTEXT * limits.max_running_requests


def _steps_bytes(needs: Needs) -> int:
    """Bytes of working memory, estimated, and of recurrent states."""
    working = estimate(needs.spec, needs.role, needs.config, needs.dtype_bytes)
    return working.total_bytes + needs.state_bytes

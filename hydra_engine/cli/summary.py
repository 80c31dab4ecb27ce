"""The start-up summary: what was loaded, where the memory went, which limits hold. About ten lines, no colours."""

from __future__ import annotations

import math

from hydra_engine import __version__
from hydra_engine.core.messages import InstanceSummary, LimitSummary


def summary_lines(summary: InstanceSummary) -> list[str]:
    kv_tokens = summary.num_kv_blocks * summary.kv_block_size
    image_rows = summary.num_image_blocks * summary.image_block_size
    slower = [op for op, implementation, _ in summary.ops if implementation in ("reference", "torch")]
    mode = "deterministic" if summary.deterministic else "not deterministic"
    lines = [
        f"hydra-engine {__version__}",
        f"  model        {summary.model} ({summary.family}), {summary.dtype}",
        f"  instance     {summary.name}, role {summary.role}, {summary.device}, "
        f"{summary.threads} thread{'s' if summary.threads > 1 else ''} per lane, ops {summary.backend}, {mode}",
        f"  memory       weights {_bytes(summary.weights_bytes)}, KV cache {_bytes(summary.kv_cache_bytes)} "
        f"({kv_tokens} tokens), image cache {_bytes(summary.image_cache_bytes)} ({image_rows} rows)",
        f"  limits       {summary.max_model_len} tokens a request, {summary.token_budget} tokens a language step, "
        f"{summary.image_budget} patches a vision step",
        *limit_lines(summary.limits),
        f"  loaded in    {summary.load_s:.1f} s",
    ]
    if slower and summary.backend.startswith("native"):
        lines.append(f"  in torch     {', '.join(slower)}")
    lines.extend(f"  note         {note}" for note in summary.notes if note)
    return lines


def limit_lines(limits: LimitSummary) -> list[str]:
    """The latency limits, what a step may hold beside 1, some and the most decodes, and what cannot be kept."""
    wanted = [(limits.tpot_limit_s, "between tokens"), (limits.ttft_limit_s, "to the first token")]
    shown = [f"{seconds(limit)} {what}" for limit, what in wanted if limit]
    if not shown:
        return []
    source = f"; costs: {limits.source}" if limits.source else ""
    lines = [f"  latency      {', '.join(shown)}{source}"]
    title = "budgets"
    for budget in limits.budgets:
        decodes = f"{budget.num_decodes} decode{'s' if budget.num_decodes != 1 else ''}"
        alone = seconds(budget.step_s)
        tokens = f"{budget.token_budget} prefill tokens{_vision(budget.vision_s)}"
        lines.append(f"  {title:12} beside {decodes} ({alone} alone): {tokens}")
        title = ""
    return lines + [f"  note         {warning}" for warning in limits.warnings]


def _vision(vision_s: float | None) -> str:
    if vision_s is None:
        return ""
    return ", or vision all along" if math.isinf(vision_s) else f", or {seconds(vision_s)} of vision"


def seconds(value: float) -> str:
    """A duration as people write it."""
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.4g} s"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"

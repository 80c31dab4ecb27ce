"""The start-up summary: what was loaded, where the memory went, which limits hold. Ten lines, no colours."""

from __future__ import annotations

from hydra_engine import __version__
from hydra_engine.core.messages import InstanceSummary


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
        f"  loaded in    {summary.load_s:.1f} s",
    ]
    if slower and summary.backend.startswith("native"):
        lines.append(f"  in torch     {', '.join(slower)}")
    lines.extend(f"  note         {note}" for note in summary.notes if note)
    return lines


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"

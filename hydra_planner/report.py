"""A plan in words and tables: what won, by how much and with what certainty, and why the others did not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

from hydra_engine.config import MediaConfig
from hydra_planner import explain
from hydra_planner.hardware.devices import Link, devices, links_between
from hydra_planner.search.load import rate_of
from hydra_planner.search.measure import SHARE, Question
from hydra_planner.search.plan import Plan
from hydra_planner.search.rows import Row
from hydra_planner.search.settings import InstanceLimits
from hydra_planner.simulator.costs import DeviceKind
from hydra_planner.workload.file import WorkloadRequest

_SHOWN = 24  # rows of the table
_WITHIN, _PRICE = 3, 9  # columns that not every plan has


def plan_lines(plan: Plan, question: Question, given: Sequence[str], seconds: float) -> list[str]:
    """`given`: the words of `serve` that the user wrote, the model first; `seconds`: that the plan took."""
    return [
        *_head(plan, question, given[0]),
        "",
        *_table(plan, question),
        "",
        *_verdict(plan, question, given),
        f"{plan.points} loads with {plan.tokens / 1e6:.2f} million tokens were simulated in {seconds:.0f} s.",
    ]


def _head(plan: Plan, question: Question, model: str) -> Iterator[str]:
    rows = question.rows
    pictures = sum(len(row.pictures) for row in rows) / len(rows)
    videos = sum(len(row.videos) for row in rows)
    rate = rate_of(rows)
    text, answer = (sum(lengths) / len(rows) for lengths in zip(*_lengths(rows), strict=True))
    yield f"model       {model}"
    counts = Counter(kind.name for kind in question.kinds.values())
    kinds = {kind.name: kind for kind in question.kinds.values()}
    for name, count in counts.items():
        yield f"devices     {count} x {name} ({kinds[name].costs.source}{_more(kinds[name])})"
    recorded = "all at once" if rate is None else f"recorded at {rate:.3g} requests/s"
    yield (
        f"workload    {len(rows)} requests, {recorded}; on the mean {text:.0f} tokens of text, {pictures:.2g} pictures"
        f"{f', {videos} videos in all' if videos else ''}, {answer:.0f} tokens out"
    )
    for name, (encode_s, prefill_s, decode_s) in plan.work.items():
        encode = f"encode {1e3 * encode_s:.3g} ms, " if question.spec.vision is not None else ""
        yield (
            f"work        of a request on {name}: {encode}prefill {1e3 * prefill_s:.3g} ms, "
            f"decode {1e3 * decode_s:.3g} ms in full batches"
        )
    given = _limits_given(question)
    if given:
        told = (f"{name} {1e3 * limit_s:g} ms" for name, limit_s in given.items())
        yield f"limits      {', '.join(told)}, for {SHARE:.0%} of the requests"


def _limits_given(question: Question) -> dict[str, float]:
    """Seconds; empty for offline plans without limits."""
    limits = {"TTFT": question.limits.ttft_s, "TPOT": question.limits.tpot_limit_s}
    return {name: limit_s for name, limit_s in limits.items() if limit_s < math.inf}


def _more(kind: DeviceKind) -> str:
    mps = "; MPS runs" if kind.has_mps else ""
    if kind.hour_price is not None:
        return f"{mps}; ${kind.hour_price:g}/h each"
    return mps if kind.price is None else f"{mps}; ${kind.price:g} each"


def _table(plan: Plan, question: Question) -> Iterator[str]:
    offline = plan.objective == "offline"
    result = ("last answer", "") if offline else ("goodput", "requests/s")
    columns = [("topology", ""), ("estimate", "requests/s"), result, ("within", "limits")]
    columns += [("TTFT p50", "ms"), ("p90", "ms"), ("TPOT p50", "ms"), ("p90", "ms"), ("tokens/s", "")]
    by_hour = any(row.hour_price is not None for row in plan.rows[:_SHOWN])
    prices = [row.hour_price if by_hour else row.price for row in plan.rows[:_SHOWN]]
    columns += [("price", "$/h" if by_hour else "$"), ("why not", "")]
    shown = (_cells(*pair, offline=offline) for pair in zip(plan.rows, prices, strict=False))
    cells = [*zip(*columns, strict=True), *shown]
    if all(price is None for price in prices):
        cells = [[*row[:_PRICE], *row[_PRICE + 1 :]] for row in cells]
    if not _limits_given(question):
        cells = [[*row[:_WITHIN], *row[_WITHIN + 1 :]] for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:-1], widths[1:-1], strict=True)), row[-1]]
        yield "  " + "  ".join(padded).rstrip()
    if len(plan.rows) > _SHOWN:
        yield f"  and {len(plan.rows) - _SHOWN} more, which can do less"


def _cells(row: Row, dollars: float | None, *, offline: bool) -> list[str]:
    point = row.point
    name = row.name + "".join(f" {setting.flags}" for setting in row.settings)
    price = "" if dollars is None else f"{dollars:.2f}"
    if point is None:
        return [name, f"{row.bound:.3g}", *[""] * 7, price, row.reason]
    result = _time(point.span_s) if offline else _goodput(row)
    times = [f"{1e3 * value:.3g}" for value in (point.ttft.p50, point.ttft.p90, point.tpot.p50, point.tpot.p90)]
    return [
        name,
        f"{row.bound:.3g}",
        result,
        f"{point.attainment:.0%}",
        *times,
        f"{point.tokens_per_s:.0f}",
        price,
        row.reason,
    ]


def _goodput(row: Row) -> str:
    if row.goodput is None:
        return ""
    return f"{row.goodput:.3g}" + ("" if row.uncertainty is None else f" ± {row.uncertainty:.2g}")


def _verdict(plan: Plan, question: Question, given: Sequence[str]) -> Iterator[str]:
    best = plan.best
    unlike = len({kind.name for kind in question.kinds.values()}) > 1
    yield f"best        {best.name}: {'; '.join(_limits(one, unlike=unlike) for one in plan.limits)}"
    if best.point is not None and best.price:
        each = explain.tokens_per_kilodollar(best.point.tokens_per_s, best.price)
        yield f"            {each:.3g} tokens/s per $1,000"
    if best.point is not None and best.hour_price and best.point.tokens_per_s:
        yield f"            ${best.hour_price / best.point.tokens_per_s / 3600 * 1e6:.3g} for a million tokens"
    yield f"to start    hydra-engine serve {' '.join([*given, *serve_flags(plan, question)])}"


def _limits(limits: InstanceLimits, *, unlike: bool) -> str:
    found = [f"{limits.image_budget} patches a vision step"] if "E" in limits.role else []
    if limits.kv_tokens:
        found += [f"{limits.token_budget} tokens a step", f"{limits.max_num_seqs} requests at once"]
        found.append(f"{limits.kv_tokens} tokens of KV")
    return f"{limits.role}{f' on {limits.device}' if unlike else ''}: {', '.join(found)}"


def serve_flags(plan: Plan, question: Question) -> list[str]:
    """Flags of `hydra-engine serve` for the best topology."""
    flags = [f"--topology {plan.best.topology}"]
    flags += [f"--{name.lower()}-slo {_flag(limit_s)}" for name, limit_s in _limits_given(question).items()]
    workers = question.config.media.decode_workers
    if workers != MediaConfig().decode_workers:
        flags.append(f"--decode-workers {workers}")
    return [*flags, *(setting.flags for setting in plan.best.settings)]


def explain_lines(plan: Plan, question: Question) -> Iterator[str]:
    """Yields HeteroServe's closed forms for every two kinds of the devices that were asked for, or for the only one.
    Of two kinds the one with the quicker decodes does the tokens, whose memory they need; of equal ones the dearer."""
    kinds = {kind.name: kind for kind in question.kinds.values()}
    has_pictures = any(row.pictures or row.videos for row in question.rows)
    pairs = list(combinations(kinds.values(), 2)) if has_pictures else []
    for number, pair in enumerate(pairs or [(kind, kind) for kind in kinds.values()]):
        vision, language = sorted(pair, key=lambda kind: (-plan.work[kind.name][2], kind.hour_price or kind.price or 0))
        told = explain.explain(question.spec, question.rows, vision, language, _links(vision, language))
        yield from explain.lines(told)[0 if not number else 1 :]


def _links(one: DeviceKind, other: DeviceKind) -> tuple[Link, ...]:
    known = {device.name: device for device in devices()}
    if one.name in known and other.name in known:
        return links_between(known[one.name], known[other.name])
    return (Link("between instances", min(one.link_bytes_per_s, other.link_bytes_per_s)),)


def _lengths(rows: Sequence[WorkloadRequest]) -> list[tuple[int, int]]:
    return [(row.prompt_tokens, row.output_tokens) for row in rows]


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _flag(seconds: float) -> str:
    return f"{1e3 * seconds:g}ms"

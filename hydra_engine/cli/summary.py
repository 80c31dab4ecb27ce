"""The start-up summary (model, memory, limits; a table for several instances), the start screen of `serve`, and the
timeline below an answer.

Takes numbers and returns lines of text without colours.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import shutil
import socket
import sys
import textwrap
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from pathlib import Path

from hydra_engine import __version__
from hydra_engine.cli.options import DEFAULT_URL
from hydra_engine.config import EngineConfig, ServerConfig
from hydra_engine.core.instances import InstanceSpec, Role, Topology
from hydra_engine.core.outputs import SloReport, StageSpan
from hydra_engine.core.reports import InstanceSummary, LimitSummary
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.core.units import size
from hydra_engine.telemetry.timeline import draw

_WIDTH = 100  # columns of the start screen
_INDENT = 15  # columns before wrapped lines
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def start_lines(summaries: Sequence[InstanceSummary]) -> list[str]:
    """The lines of the summary; `summaries` are in the topology's order."""
    # Limits of requests come from instances with a KV cache, limits of vision steps from instances that encode.
    serving = [s for s in summaries if s.num_kv_blocks] or list(summaries)
    encoding = [s for s in summaries if s.image_budget and "E" in s.role] or list(summaries)
    # An instance that decodes, preferably one that also prefills.
    decoding = max(summaries, key=lambda s: 2 * ("D" in s.role) + ("P" in s.role))
    others = ((s.name, warning) for s in summaries if s is not decoding for warning in s.limits.warnings)
    notes = ((s.name, note) for s in summaries for note in s.notes if note)
    return [
        f"hydra-engine {__version__}",
        f"  model        {_model(summaries)}",
        *(_instance(summaries[0]) if len(summaries) == 1 else _topology(summaries)),
        *_steps(summaries),
        *_captured(summaries),
        f"  limits       {min(s.max_model_len for s in serving)} tokens a request, "
        f"{min(s.token_budget for s in serving)} tokens a language step, "
        f"{min(s.image_budget for s in encoding)} patches a vision step",
        *_own_limits(summaries),
        *limit_lines(decoding.limits),
        f"  loaded in    {max(s.load_s for s in summaries):.1f} s",
        *_slower(summaries),
        *_notes((*others, *notes), len(summaries)),
    ]


def _own_limits(summaries: Sequence[InstanceSummary]) -> list[str]:
    """A line for each instance, if limits differ between instances that use them."""
    decoders = {(s.token_budget, s.max_num_seqs) for s in summaries if s.num_kv_blocks}
    encoders = {s.image_budget for s in summaries if "E" in s.role}
    lines = []
    for s in summaries:
        said = []
        if s.num_kv_blocks and len(decoders) > 1:
            said += [f"{s.token_budget} tokens a language step", f"{s.max_num_seqs} requests at once"]
        if "E" in s.role and len(encoders) > 1:
            said.append(f"{s.image_budget} patches a vision step")
        if said:
            lines.append(f"    of {s.name:<8} {', '.join(said)}")
    return lines


def _instance(summary: InstanceSummary) -> list[str]:
    kv_tokens = summary.num_kv_blocks * summary.kv_block_size
    image_rows = summary.num_image_blocks * summary.image_block_size
    return [
        f"  instance     {summary.name}, role {summary.role}, {summary.device}, {_how(summary)}",
        f"  memory       weights {size(summary.weights_bytes)}, KV cache {size(summary.kv_cache_bytes)} "
        f"({kv_tokens} tokens), image cache {size(summary.image_cache_bytes)} ({image_rows} rows)",
    ]


def _topology(summaries: Sequence[InstanceSummary]) -> list[str]:
    topology = Topology(tuple(InstanceSpec(Role.parse(s.role), "auto") for s in summaries))
    shown = f"{topology}: {len(summaries)} instances, {_how(summaries[0])}"
    return [f"  topology     {shown}", *_table(summaries)]


def columns(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Rows of equal length as left-aligned lines, two spaces between columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _captured(summaries: Sequence[InstanceSummary]) -> list[str]:
    number, most = max(s.num_graphs for s in summaries), max(s.graph_bytes for s in summaries)
    patches = max(s.captured_patches for s in summaries)
    kinds = ["decode steps"] if any(s.graph_bytes and "D" in s.role for s in summaries) else []
    tokens = max(s.captured_tokens for s in summaries)
    kinds += [f"steps with prompts of up to {tokens} tokens"] if tokens else []
    kinds += [f"encodes of up to {patches} patches"] if patches else []
    each = "" if len(summaries) == 1 else ", in each instance at most"
    return [f"  graphs       {number}, {size(most)} for captured {_listed(kinds)}{each}"] if most else []


def _listed(kinds: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))


def _model(summaries: Sequence[InstanceSummary]) -> str:
    """The model's line; parameters are counted over all instances, each part once."""
    first = summaries[0]
    parts = [max(getattr(s, part) for s in summaries) for part in ("vision_weights_bytes", "language_weights_bytes")]
    size_in_memory = sum(parts) or first.weights_bytes
    kept = first.weights_dtype or first.dtype
    count = first.num_parameters or size_in_memory // _BYTES.get(kept, 4)
    dtypes = first.dtype if kept == first.dtype else f"weights {kept}, activations {first.dtype}"
    if first.quantization:
        dtypes = f"decoder {first.quantization}, {dtypes}"
    return f"{first.model} ({first.family}), {_number(count)} parameters, {dtypes}"


def _number(count: int) -> str:
    for unit, scale in (("billion", 10**9), ("million", 10**6)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return str(count)


def _table(summaries: Sequence[InstanceSummary]) -> list[str]:
    vision = max(s.vision_weights_bytes for s in summaries)
    language = max(s.language_weights_bytes for s in summaries)
    rows = [("instance", "role", "device", "weights", "KV cache", "image cache")]
    for s in summaries:
        lacks = []
        if language and not s.language_weights_bytes:
            lacks.append(f"no decoder: -{size(language)}")
        if vision and not s.vision_weights_bytes:
            lacks.append(f"no tower: -{size(vision)}")
        weights = size(s.weights_bytes) + (f" ({', '.join(lacks)})" if lacks else "")
        kv = f"{size(s.kv_cache_bytes)} ({s.num_kv_blocks * s.kv_block_size} tokens)" if s.num_kv_blocks else "none"
        images = size(s.image_cache_bytes) if s.num_image_blocks else "none"
        row = (s.role, s.device, weights, kv, images)
        if row == rows[-1][1:]:  # one line for equal neighbours
            rows[-1] = (f"{rows[-1][0].split('..')[0]}..{s.name}", *row)
        else:
            rows.append((s.name, *row))
    return columns(rows, "    ")


def _steps(summaries: Sequence[InstanceSummary]) -> list[str]:
    """Lines on activations and free memory, one per instance whose activations were measured at start."""
    lines = []
    for s in summaries:
        if s.activation_bytes:
            whose = f"{s.name}: " if len(summaries) > 1 else ""
            free = f"{size(s.free_bytes)} of {size(s.device_bytes)} free"
            lines.append(f"{whose}activations {size(s.activation_bytes)}, {free}")
    return [f"  {'steps' if not index else '':12} {line}" for index, line in enumerate(lines)]


def _notes(notes: Iterable[tuple[str, str]], num_instances: int) -> list[str]:
    """Lines of notes, each once, with the names of its instances unless it is from all."""
    by_text: dict[str, list[str]] = {}
    for name, text in notes:
        by_text.setdefault(text, []).append(name)
    return [
        f"  note         {text}" if len(names) == num_instances else f"  note         {', '.join(names)}: {text}"
        for text, names in by_text.items()
    ]


def _how(summary: InstanceSummary) -> str:
    mode = "deterministic" if summary.deterministic else "not deterministic"
    threads = f"{summary.threads} thread{'s' if summary.threads > 1 else ''} per lane"
    return f"{threads}, ops {summary.backend}, {mode}"


def _slower(summaries: Sequence[InstanceSummary]) -> list[str]:
    """The line that names the operations without a native kernel; none if all have one."""
    slower = [
        op
        for summary in summaries
        if summary.backend.startswith("native")
        for op, implementation, _ in summary.ops
        if implementation == "reference"
    ]
    return [f"  in torch     {', '.join(dict.fromkeys(slower))}"] if slower else []


def limit_lines(limits: LimitSummary) -> list[str]:
    """The latency limits, the budgets beside one, some and the most decodes, and warnings about limits that cannot be
    met."""
    targets = [(limits.tpot_limit_s, "between tokens"), (limits.ttft_limit_s, "to the first token")]
    shown = [f"{seconds(limit)} {what}" for limit, what in targets if limit]
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
    return ", or vision for the whole step" if math.isinf(vision_s) else f", or {seconds(vision_s)} of vision"


def seconds(value: float) -> str:
    """A duration, in ms below one second."""
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.4g} s"


# ---- the start screen of `serve`


def screen_lines(
    summaries: Sequence[InstanceSummary],
    config: EngineConfig,
    server: ServerConfig,
    sampling: SamplingParams,
    *,
    url: str,
    model_name: str,
) -> list[str]:
    """The start screen. `sampling`: the defaults of requests; `url`: the server's address; `model_name`: the model's
    name in the API."""
    url = _reachable(url)
    summary = start_lines(summaries)
    notes = [line for line in summary if line.startswith("  note")]
    lines = [
        *(line for line in summary if line not in notes),
        *_budgets(config),
        _admission(summaries, config, server),
        *_sampling(config, sampling),
        _access(server),
        *notes,
        *([f"  page         {url}/"] if server.ui else []),
        f"  try it       {_program()} chat{'' if url == DEFAULT_URL else f' --url {url}'}, or:",
    ]
    return [*(part for line in lines for part in _wrapped(line)), *_curl(server, url, model_name)]


def _budgets(config: EngineConfig) -> list[str]:
    """A hint on how to set a latency limit; none if there is one, whose budgets the summary shows."""
    if config.scheduler.tpot_slo is not None:
        return []
    return ["  budgets      fixed, as above; --tpot-slo 40ms derives them from step times of this machine"]


def _admission(summaries: Sequence[InstanceSummary], config: EngineConfig, server: ServerConfig) -> str:
    media, scheduler = config.media, config.scheduler
    at_once = min((s.max_num_seqs for s in summaries if s.num_kv_blocks and s.max_num_seqs), default=None)
    one = media.images_of_request == 1 or any(s.one_picture for s in summaries)
    pictures = "1 picture" if one else f"{media.images_of_request} pictures"
    return (
        f"  admission    {at_once or scheduler.max_running_requests} requests at once, {scheduler.max_queue} accepted; "
        f"{pictures} a request, bodies of {size(server.max_body_bytes)}"
    )


def _sampling(config: EngineConfig, sampling: SamplingParams) -> list[str]:
    """Sampling defaults of the model and the operator, if there are any."""
    numbers = {name: value for name, value in sampling.non_default_fields.items() if isinstance(value, int | float)}
    chosen = ", ".join(
        [f"{name} {value:g}" for name, value in numbers.items()] + ["stop strings"] * bool(sampling.stop)
    )
    files = ["generation_config.json"] if config.generation_config == "auto" else []
    options = ["--override-generation-config"] if config.override_generation_config is not None else []
    return [f"  sampling     {chosen} by default ({', '.join(files + options)})"] if chosen else []


def _access(server: ServerConfig) -> str:
    keys = len(set(server.api_key))
    who, keys_text = "OPEN TO THE NETWORK", "asks for no key"
    if _requires_key(server):
        who, keys_text = "the network", f"asks for one of {keys} API keys" if keys > 1 else "asks for an API key"
    if _is_loopback(server.host):
        who = "this machine only"
    admin = ", /admin with its own" if server.admin_key else ""
    return f"  access       {who}, {keys_text}{admin}"


def _requires_key(server: ServerConfig) -> bool:
    return bool(server.api_key or server.api_key_file)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reachable(url: str) -> str:
    """`url`, with the address from which this machine reaches others in place of 0.0.0.0 or ::, which nobody else can
    open. Asks the routing table; sends nothing. Loopback without a route."""
    for every, far, near in (("//0.0.0.0:", "192.0.2.1", "127.0.0.1"), ("//[::]:", "2001:db8::1", "::1")):
        if every in url:
            own = near
            with contextlib.suppress(OSError), socket.socket(_FAMILIES[":" in far], socket.SOCK_DGRAM) as routed:
                routed.connect((far, 9))
                own = routed.getsockname()[0]
            return url.replace(every, f"//[{own}]:" if ":" in own else f"//{own}:")
    return url


def _program() -> str:
    """The command as it can be typed here: a relative path if the shell would not find it."""
    own = Path(sys.executable).with_name("hydra-engine")
    return "hydra-engine" if shutil.which("hydra-engine") or not own.exists() else os.path.relpath(own)


def _curl(server: ServerConfig, url: str, model_name: str) -> list[str]:
    """The lines of a curl command to paste; it reads the key from the shell's HYDRA_API_KEY."""
    body = {"model": model_name, "messages": [{"role": "user", "content": "Hello!"}]}
    parts = [f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'"]
    if _requires_key(server):
        parts.append('-H "Authorization: Bearer $HYDRA_API_KEY"')
    parts.append(f"-d {shlex.quote(json.dumps(body))}")
    return " \\\n  ".join(parts).split("\n")


def _wrapped(line: str) -> list[str]:
    """Wraps a long line, except rows of tables."""
    if len(line) <= _WIDTH or line.startswith("    "):
        return [line]
    return textwrap.wrap(line, _WIDTH, subsequent_indent=" " * _INDENT, break_long_words=False, break_on_hyphens=False)


# ---- below an answer


def timeline_lines(
    timeline: Sequence[StageSpan], slo: SloReport, *, width: int = 48, clock_error_s: float = 0.0
) -> list[str]:
    """The timeline of an answer, and whether it met its limits. `width`: columns of a bar."""
    return [*draw(timeline, width=width, clock_error_s=clock_error_s), *_verdict(slo)]


def _verdict(slo: SloReport) -> list[str]:
    """A line with the verdict over the limits; none without limits."""
    parts = []
    if slo.ttft_limit_s is not None:
        parts.append(f"first token within {seconds(slo.ttft_limit_s)}: {_word(slo.ttft_met)}")
    if slo.tpot_limit_s is not None:
        late = f" ({slo.late_gaps} of {slo.num_gaps} late)" if slo.num_gaps else ""
        parts.append(f"90 % of gaps within {seconds(slo.tpot_limit_s)}: {_word(slo.tpot_met)}{late}")
    if slo.reason:
        parts.append(slo.reason)
    return [f"{'limits':12} {' · '.join(parts)}"] if parts else []


def _word(met: bool | None) -> str:
    return {True: "met", False: "missed", None: "not known"}[met]

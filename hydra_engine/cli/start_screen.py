"""The start screen of `serve`: model, memory, limits, access, and a command to paste. 100 columns, no colours."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Sequence
from ipaddress import ip_address

from hydra_engine.cli.chat import DEFAULT_URL
from hydra_engine.cli.summary import start_lines
from hydra_engine.config import EngineConfig, ServerConfig
from hydra_engine.core.messages import InstanceSummary
from hydra_engine.core.request import SamplingParams
from hydra_engine.core.units import size

_WIDTH = 100
_INDENT = 15  # of what stands beside a title


def screen_lines(
    summaries: Sequence[InstanceSummary],
    config: EngineConfig,
    server: ServerConfig,
    sampling: SamplingParams,
    *,
    url: str,
    model_name: str,
) -> list[str]:
    """`sampling`: the defaults of requests; `url`: the server's address; `model_name`: the model's name in the API."""
    summary = start_lines(summaries)
    notes = [line for line in summary if line.startswith("  note")]
    lines = [
        *(line for line in summary if line not in notes),
        *_budgets(config),
        _admission(config, server),
        *_sampling(config, sampling),
        _access(server),
        *notes,
        *([f"  page         {url}/"] if server.ui else []),
        f"  try it       hydra-engine chat{_chat_flags(url)}, or:",
    ]
    return [*(part for line in lines for part in _wrapped(line)), *_curl(server, url, model_name)]


def _budgets(config: EngineConfig) -> list[str]:
    """A hint how to set a latency limit; with a limit the summary shows the budgets."""
    if config.scheduler.tpot_slo is not None:
        return []
    return ["  budgets      fixed, as above; --tpot-slo 40ms derives them from step times of this machine"]


def _admission(config: EngineConfig, server: ServerConfig) -> str:
    media, scheduler = config.media, config.scheduler
    return (
        f"  admission    {scheduler.max_num_seqs} requests at once, {scheduler.max_queue} accepted; "
        f"{media.max_images} pictures a request, bodies of {size(server.max_body_bytes)}"
    )


def _sampling(config: EngineConfig, sampling: SamplingParams) -> list[str]:
    """Sampling defaults of the model and the operator, if there are any."""
    chosen = ", ".join(f"{name} {value:g}" for name, value in sampling.chosen.items())
    files = ["generation_config.json"] if config.generation_config == "auto" else []
    options = ["--override-generation-config"] if config.override_generation_config is not None else []
    return [f"  sampling     {chosen} by default ({', '.join(files + options)})"] if chosen else []


def _access(server: ServerConfig) -> str:
    keys = len(set(server.api_key))
    who, keys_text = "OPEN TO THE NETWORK", "asks for no key"
    if _asks(server):
        who, keys_text = "the network", f"asks for one of {keys} API keys" if keys > 1 else "asks for an API key"
    if _is_loopback(server.host):
        who = "this machine only"
    admin = ", /admin with its own" if server.admin_key else ""
    return f"  access       {who}, {keys_text}{admin}"


def _asks(server: ServerConfig) -> bool:
    return bool(server.api_key or server.api_key_file)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _chat_flags(url: str) -> str:
    return "" if url == DEFAULT_URL else f" --url {url}"


def _curl(server: ServerConfig, url: str, model_name: str) -> list[str]:
    """A command to paste; it reads the key from the shell's HYDRA_API_KEY."""
    body = {"model": model_name, "messages": [{"role": "user", "content": "Hello!"}]}
    parts = [f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'"]
    if _asks(server):
        parts.append('-H "Authorization: Bearer $HYDRA_API_KEY"')
    parts.append(f"-d {shlex.quote(json.dumps(body))}")
    return " \\\n  ".join(parts).split("\n")


def _wrapped(line: str) -> list[str]:
    """Long lines are wrapped, rows of tables are not."""
    if len(line) <= _WIDTH or line.startswith("    "):
        return [line]
    return textwrap.wrap(line, _WIDTH, subsequent_indent=" " * _INDENT, break_long_words=False, break_on_hyphens=False)

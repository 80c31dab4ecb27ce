"""The command line, turned into one frozen Settings. Does not know what the modes do with it."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.baselines import NAMES
from bench.serve.servers import Server, ours
from hydra_planner.slo import Limits
from hydra_planner.workload.arrivals import Arrivals
from hydra_planner.workload.shapes import MIXED, SHAPES, TABLE_3
from hydra_terminal.load.workload import TEXT_SHARE_HELP, Workload

MODES = {
    "curve": "attainment over request rates, and goodput at 90 %",
    "breakdown": "the eight phases of a request's latency",
    "tail": "gaps of text streams without and with bursts of large pictures",
    "budget": "steps over the TPOT limit, and how much of the limit is used",
    "ablation": "goodput with everything on, and with each switch off",
}

# What --quick and a full run take where the command line says nothing.
_DEFAULTS: dict[str, tuple[float, float]] = {
    "requests": (40, 64),
    "scale": (0.25, 1.0),
    "bisect": (1, 3),
    "rounds": (1, 1),
    "streams": (4, 4),
    "stream_tokens": (1024, 512),
    "burst": (3, 4),
    "burst_every": (0.2, 4.0),
    "concurrency": (12, 24),
    "seconds": (4, 30),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """`rates` and `rate`: requests per second; empty or None are found. `load_s`: how long a load lasts, in place of
    `requests`. `alone`: requests of a client that waits for each. `limits` None: measured on the idle server."""

    modes: tuple[str, ...]
    model: str
    servers: tuple[Server, ...]
    server_flags: str
    workload: Workload
    arrivals: Arrivals
    requests: int
    load_s: float | None
    alone: int
    rates: tuple[float, ...]
    rate: float | None
    rounds: int
    bisect: int
    drain_s: float
    limits: Limits | None
    limits_to_server: bool
    switches: tuple[str, ...]
    streams: int
    stream_tokens: int
    burst: int
    burst_every_s: float
    concurrency: int
    seconds: float
    trace: Path | None
    output: Path | None
    pictures: Path | None
    redraw: Path | None
    quick: bool


def seconds(text: str) -> float:
    """40ms, 1.5s or plain seconds. Raises ValueError."""
    value = float(text[:-2]) / 1e3 if text.endswith("ms") else float(text.removesuffix("s"))
    if not value > 0:
        raise ValueError("a time must be more than 0")
    return value


def settings_from(arguments: Sequence[str] | None, description: str | None) -> Settings:
    """Ends the process with a usage message where the command line is wrong."""
    parser = _parser(description)
    given = parser.parse_args(arguments)
    for name, (quick, full) in _DEFAULTS.items():
        if getattr(given, name) is None:
            setattr(given, name, type(full)(quick if given.quick else full))
    try:
        return Settings(
            modes=tuple(MODES) if given.mode == "all" else (given.mode,),
            model=given.model,
            servers=_servers(given),
            server_flags=given.server_args,
            workload=Workload.named(given.workload, given.text_share, given.scale, not given.no_reuse, given.seed),
            arrivals=Arrivals.parse(given.arrivals),
            requests=given.requests,
            load_s=given.load_seconds,
            alone=given.alone,
            rates=tuple(float(rate) for rate in given.rates.split(",")) if given.rates else (),
            rate=given.rate,
            rounds=given.rounds,
            bisect=given.bisect,
            drain_s=given.drain,
            limits=_limits(given),
            limits_to_server=not given.no_server_limits,
            switches=tuple(given.switch),
            streams=given.streams,
            stream_tokens=given.stream_tokens,
            burst=given.burst,
            burst_every_s=given.burst_every,
            concurrency=given.concurrency,
            seconds=given.seconds,
            trace=given.trace,
            output=given.output,
            pictures=given.pictures,
            redraw=given.redraw,
            quick=given.quick,
        )
    except ValueError as error:
        parser.error(str(error))


def _servers(given: argparse.Namespace) -> tuple[Server, ...]:
    first = given.name or ("hydra-engine" if not given.base_url else "server")
    if given.base_url:
        servers = [Server(first, base_url=given.base_url, key=given.api_key)]
    else:
        servers = [ours(first, given.model, given.server_args)]
    for name, flags in map(_named, given.config):
        servers.append(ours(name, given.model, f"{given.server_args} {flags}"))
    servers += [ours(name, given.model, given.server_args, baseline=name) for name in given.baseline]
    for name, command in map(_named, given.command):
        words = shlex.split(command)
        if words[:1] == ["python"]:
            words[0] = sys.executable
        servers.append(Server(name, tuple(words)))
    for name, url in map(_named, given.peer):
        servers.append(Server(name, base_url=url, key=given.api_key))
    if len({server.name for server in servers}) < len(servers):
        raise ValueError("every server needs a name of its own")
    return tuple(servers)


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"give NAME=VALUE, not {text!r}")
    return name, value.strip()


def _limits(given: argparse.Namespace) -> Limits | None:
    if given.limits:
        if given.workload not in TABLE_3[given.limits]:
            raise ValueError(f"--limits takes the limits of one workload; name one of {', '.join(MIXED)}")
        return Limits(*TABLE_3[given.limits][given.workload], source=f"HydraInfer, Table 3, {given.limits}")
    if (given.ttft_slo is None) != (given.tpot_slo is None):
        raise ValueError("give both --ttft-slo and --tpot-slo, or neither")
    return Limits(given.ttft_slo, given.tpot_slo) if given.ttft_slo is not None else None


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "; ".join(f"{name}: {what}" for name, what in MODES.items()).replace("%", "%%")
    parser.add_argument("mode", nargs="?", default="curve", choices=(*MODES, "all"), help=f"{text}; all")
    parser.add_argument("--quick", action="store_true", help="small loads: under a minute with the demo model")
    _add_servers(parser.add_argument_group("servers, all under the same load, in turns"))
    _add_load(parser.add_argument_group("load"))
    _add_limits(parser.add_argument_group("limits"))
    _add_modes(parser.add_argument_group("modes"))
    group = parser.add_argument_group("output")
    group.add_argument("--output", type=Path, metavar="FILE", help="the JSON document, also the last line printed")
    group.add_argument("--pictures", type=Path, metavar="DIR", help="one PNG for each mode (needs matplotlib)")
    group.add_argument("--trace", type=Path, metavar="FILE", help="Chrome trace of the last load, and FILE's PNG Gantt")
    group.add_argument(
        "--redraw", type=Path, metavar="FILE", help="only draw the pictures of a document written before"
    )
    return parser


def _add_servers(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", default="demo", help="what our server serves (default: demo)")
    group.add_argument("--server-args", default="", metavar="FLAGS", help="flags for every server of ours")
    group.add_argument("--base-url", metavar="URL", help="take a server that runs already instead of starting ours")
    group.add_argument("--api-key", help="for servers that run already")
    group.add_argument("--name", help="what the first server is called")
    text = "; ".join(f"{name}: {what}" for name, what in NAMES.items())
    group.add_argument("--baseline", action="append", default=[], choices=NAMES, help=f"also {text}")
    for flag, value, text in (
        ("--config", "NAME=FLAGS", "also our server with these flags"),
        ("--command", "NAME=COMMAND", "also a server started by this command; it prints `ready on URL`"),
        ("--peer", "NAME=URL", "also a server that runs already"),
    ):
        group.add_argument(flag, action="append", default=[], metavar=value, help=text)


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--workload", default="mixed", help=f"mixed, or of {', '.join(SHAPES)} (default: mixed)")
    group.add_argument("--text-share", type=float, help=TEXT_SHARE_HELP)
    group.add_argument("--scale", type=float, help="shrinks picture sides, prompts and outputs, for small models")
    group.add_argument("--no-reuse", action="store_true", help="no two questions share a picture")
    group.add_argument(
        "--arrivals", default="poisson", help="poisson, gamma:CV (bursty above 1) or onoff:ON,OFF seconds"
    )
    group.add_argument("--requests", type=int, help="requests of each load")
    group.add_argument(
        "--load-seconds", type=float, metavar="S", help="so many requests as arrive in S seconds instead"
    )
    group.add_argument("--alone", type=int, default=0, metavar="N", help="curve: before, N requests one after another")
    group.add_argument("--rates", help="requests per second of a curve, for example 1,2,4; default: around goodput")
    group.add_argument("--rate", type=float, help="requests per second of a breakdown; default: half of goodput")
    group.add_argument("--rounds", type=int, help="repeats everything, servers in turns; requests are pooled")
    group.add_argument("--drain", type=float, default=60.0, help="seconds that the last requests get to end")
    group.add_argument("--seed", type=int, default=0)


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ttft-slo", type=seconds, metavar="TIME", help="for example 1s")
    group.add_argument("--tpot-slo", type=seconds, metavar="TIME", help="for example 40ms; default: 3 idle gaps")
    group.add_argument("--limits", choices=tuple(TABLE_3), help="HydraInfer's Table 3 for this model and the workload")
    group.add_argument("--no-server-limits", action="store_true", help="do not tell our server the limits")


def _add_modes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--bisect", type=int, help="loads that narrow goodput down after it is between two rates")
    group.add_argument("--switch", action="append", default=[], metavar="NAME", help="ablation: only these switches")
    group.add_argument("--streams", type=int, help="tail: text streams")
    group.add_argument("--stream-tokens", type=int, help="tail: tokens of each stream")
    group.add_argument("--burst", type=int, help="tail: pictures of each burst")
    group.add_argument("--burst-every", type=float, help="tail: seconds between bursts")
    group.add_argument("--concurrency", type=int, help="budget: requests always under way")
    group.add_argument("--seconds", type=float, help="budget: how long")

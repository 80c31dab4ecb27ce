"""Common parts of the micro-benchmarks: flags, timing on any device, and one document with the inputs of its ratios.

    arguments = parse(__doc__)
    with Report("name", arguments, ceilings) as report:
        times = timed(report.device, {"ours": run, "peer": other}, report.effort)
        report.row("what", times["ours"], work=[Work("weights", flops, num_bytes)], peers={"peer": times["peer"]})

Timing: candidates take turns, so that drift meets all of them alike; a turn has as many calls as fill `min_seconds`;
median and percentiles are over turns. On CUDA a turn lies between two events of the calling thread's stream, elsewhere
between two readings of the clock. A result is checked (`require`, `agree`) before its time counts. Knows no models.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.common import card, emit, write_document
from bench.micro.floors import Ceilings, Work, overlap_s, serial_s
from bench.micro.machine import Power, device_card, on_gpu
from hydra_engine.backend.cuda.graphs import GraphPools

Run = Callable[[], object]

_COLD_CPU_BYTES = 96 << 20  # what rotated inputs of a processor fill at least
_REASON_LENGTH = 300
_COLD_L2S = 3  # times the second-level cache of a GPU


class Seconds(NamedTuple):
    """Seconds of one call, over turns."""

    median: float
    p5: float
    p95: float
    turns: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Seconds:
        """Statistics of values of one call each; percentiles by the nearest rank."""
        ordered = sorted(values)

        def rank(share: float) -> float:
            return ordered[min(len(ordered) - 1, max(0, round(share * (len(ordered) - 1))))]

        return cls(median(ordered), rank(0.05), rank(0.95), len(ordered))


class Effort(NamedTuple):
    """Durations of timing."""

    turns: int
    min_seconds: float  # of a turn
    max_seconds: float  # of all turns of one candidate, once it has had three


QUICK = Effort(9, 0.002, 1.0)
FULL = Effort(21, 0.004, 1.0)


# ---- flags


def parse(
    doc: str | None,
    add: Callable[[argparse.ArgumentParser], None] | None = None,
    argv: Sequence[str] | None = None,
) -> argparse.Namespace:
    """quick (bool), device ("cpu", "cuda:N"), model (names with commas, or None), threads, deterministic,
    quantization, seed, json and ceilings (Path or None), and what `add` adds."""
    return _completed(_parser(doc, add).parse_args(argv))


def parse_known(
    doc: str | None, add: Callable[[argparse.ArgumentParser], None], argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Returns the result of `parse` and the words that this benchmark does not know."""
    arguments, unknown = _parser(doc, add).parse_known_args(argv)
    return _completed(arguments), unknown


def _parser(doc: str | None, add: Callable[[argparse.ArgumentParser], None] | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_true", help="under a minute (the default)")
    mode.add_argument("--full", action="store_true", help="all sizes, more turns")
    parser.add_argument("--model", help="directories, 'demo' or names of shapes, with commas")
    parser.add_argument("--device", default="auto", help="cpu or cuda:N; auto: the first GPU if there is one")
    parser.add_argument("--threads", type=int, default=None, help="of a processor; default: one for each core")
    parser.add_argument("--deterministic", action="store_true", help="batch-invariant operations on a GPU too")
    parser.add_argument("--quantization", default="auto", help="of the models, as --quantization of serve")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also writes the document there")
    parser.add_argument("--ceilings", type=Path, metavar="PATH", help="the ceilings of this document, if it exists")
    if add is not None:
        add(parser)
    return parser


def _completed(arguments: argparse.Namespace) -> argparse.Namespace:
    arguments.quick = not arguments.full
    if arguments.device == "auto":
        arguments.device = "cuda:0" if torch.cuda.is_available() else "cpu"
    return arguments


# ---- timing


def timed(
    device: torch.device, candidates: Mapping[str, Run], effort: Effort = QUICK, *, idle_s: float = 0.0
) -> dict[str, Seconds]:
    """Seconds of one call of each candidate. Warms each up first. `idle_s`: before each turn, so that the board is not
    at its power cap."""
    one_turn = functools.partial(_cuda_turn, device) if on_gpu(device) else _host_turn
    calls = {name: _calls(one_turn, run, effort.min_seconds) for name, run in candidates.items()}
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(effort.turns):
        for name, run in candidates.items():
            values = found[name]
            if len(values) >= 3 and sum(values) * calls[name] > effort.max_seconds:
                continue
            if idle_s:
                time.sleep(idle_s)
            values.append(one_turn(run, calls[name]) / calls[name])
    return {name: Seconds.of(values) for name, values in found.items()}


def scaled(seconds: Mapping[str, Seconds], calls: int) -> dict[str, Seconds]:
    """Seconds of one of the `calls` equal pieces of work of each timed call."""
    return {name: Seconds(s.median / calls, s.p5 / calls, s.p95 / calls, s.turns) for name, s in seconds.items()}


def _calls(one_turn: Callable[[Run, int], float], run: Run, min_seconds: float) -> int:
    one_turn(run, 1)  # compiles, allocates
    return max(1, min(10_000, int(min_seconds / max(one_turn(run, 1), 1e-7))))


def _host_turn(run: Run, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - started


def _cuda_turn(device: torch.device, run: Run, calls: int) -> float:
    stream = torch.cuda.current_stream(device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(stream)
    for _ in range(calls):
        run()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def cold_copies(device: torch.device, num_bytes: int, most: int = 256) -> int:
    """Number of inputs of `num_bytes` of which none is in a cache when its turn comes again, at most `most`."""
    cold = _COLD_CPU_BYTES
    if on_gpu(device):
        cold = _COLD_L2S * torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(most, -(-cold // max(num_bytes, 1))))


def in_turn(run: Callable[[int], object], count: int) -> Run:
    """run(0), run(1), .., run(count - 1), run(0), .."""
    turn = itertools.cycle(range(count))
    return lambda: run(next(turn))


def captured(device: torch.device, launch: Run, calls: int = 1) -> Run:
    """`calls` launches as one CUDA graph, to be replayed; `scaled` divides the time. Elsewhere the calls themselves, so
    that a benchmark reads the same everywhere."""

    def together() -> None:
        for _ in range(calls):
            launch()

    return GraphPools(device).capture(together).replay if on_gpu(device) else together


# ---- results that are checked


class WrongResult(Exception):
    """The code to be timed computes something else."""


def require(ok: bool, what: str) -> None:
    if not ok:
        raise WrongResult(f"wrong result of {what}")


def agree(what: str, result: Tensor, expected: Tensor, *, tolerance: float = 0.02) -> None:
    """Requires both to be finite and of one shape, and the norm of the difference over that of `expected`, in float32,
    to be at most `tolerance`."""
    require(result.shape == expected.shape, f"{what}: shape {tuple(result.shape)} for {tuple(expected.shape)}")
    left, right = result.float(), expected.float()
    error = float((left - right).norm() / right.norm().clamp_min(1e-9))
    require(error <= tolerance, f"{what}: {error:.1%} off")  # NaN is not <=


# ---- the document


class Report:
    """The document of one benchmark: card, ceilings of the same run, rows. Written to `--json` after every row, so that
    what ends a benchmark takes no row with it (`complete` says whether it came to its end), and printed as the last
    line of the output. The process ends with status 1 if a case failed or its result was wrong."""

    def __init__(self, bench: str, arguments: argparse.Namespace, ceilings: Ceilings | None = None) -> None:
        self.device = torch.device(arguments.device)
        self.quick: bool = arguments.quick
        self.effort = QUICK if arguments.quick else FULL
        self.ceilings = ceilings
        self._bench = bench
        self._json: Path | None = arguments.json
        self._rows: list[dict[str, Any]] = []
        self._skipped: list[dict[str, str]] = []
        self._wrong: list[dict[str, str]] = []
        self._failed: list[dict[str, str]] = []
        self._extra: dict[str, Any] = {}
        self._power = Power(self.device)
        self._since = self._began = time.perf_counter()

    def __enter__(self) -> Report:
        self._write()  # says that it has begun
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._power.close()
        if error is not None:
            self._fail("the rest", error)
            self._write()
            return
        emit(self._write(complete=True))
        if self._wrong or self._failed:
            raise SystemExit(f"{len(self._wrong)} results were wrong, {len(self._failed)} cases failed")

    @contextmanager
    def case(self, what: str) -> Iterator[None]:
        """Runs a case. If a result is wrong, memory does not suffice or anything else fails, the document says so and
        the next case runs. Raises if the device itself has failed."""
        try:
            yield
        except WrongResult as error:
            self._wrong.append({"what": what, "reason": str(error)})
            print(f"{what:58} NOT TIMED: {error}", flush=True)
        except torch.OutOfMemoryError as error:
            self.skip(what, str(error).split(". ")[0])
        except Exception as error:  # noqa: BLE001 - a kernel that does not compile for one size is that size's
            self._fail(what, error)
            if on_gpu(self.device):
                torch.cuda.synchronize(self.device)

    @contextmanager
    def optional(self, what: str) -> Iterator[None]:
        """Runs an optional part of a case, such as a peer. If it fails or finds no memory, the document says so and the
        case continues. A wrong result is an error of the case."""
        try:
            yield
        except WrongResult:
            raise
        except torch.OutOfMemoryError as error:
            self.skip(what, str(error).split(". ")[0])
        except Exception as error:  # noqa: BLE001 - other people's code, of any release
            self._fail(what, error)
            if on_gpu(self.device):
                torch.cuda.synchronize(self.device)

    def row(
        self,
        what: str,
        seconds: Seconds,
        *,
        work: Sequence[Work] = (),
        overlap: bool = False,
        floor_s: float | None = None,
        formula: str = "",
        inputs: Mapping[str, Any] | None = None,
        peers: Mapping[str, Seconds] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Adds a measured row, prints a line of it and returns it. The floor is that of `work`, part by part under
        this report's ceilings (with `overlap`: all parts at the same time), or `floor_s` with `formula`, a sentence
        that says how it follows from `inputs`. `of_floor` is floor over median: 1 is the floor; `of_sustained_floor`
        the same at the rate of matrix products that the board keeps up. `more` is added to the row unchanged."""
        row: dict[str, Any] = {"what": what, "inputs": dict(inputs or {})}
        if work:
            assert self.ceilings is not None, "work needs ceilings"
            row["work"] = [part._asdict() for part in work]
            least, formula = (overlap_s, OVERLAP) if overlap else (serial_s, SERIAL)
            floor_s, sustained = least(work, self.ceilings.rates), self.ceilings.sustained
            row["overlap_floor_s"] = overlap_s(work, self.ceilings.rates)
            row["sustained_floor_s"] = None if sustained is None else least(work, sustained)
        row |= {"formula": formula, "floor_s": floor_s, "seconds": seconds._asdict()}
        row["of_floor"] = None if floor_s is None else floor_s / seconds.median
        if (at_the_cap := row.get("sustained_floor_s")) is not None:
            row["of_sustained_floor"] = at_the_cap / seconds.median
        row["peers"] = {name: peer._asdict() for name, peer in (peers or {}).items()}
        row["over_peers"] = {name: peer.median / seconds.median for name, peer in (peers or {}).items()}
        row |= more
        now = time.perf_counter()
        row |= self._power.between(self._since, now)
        self._since = now
        self._rows.append(row)
        print(_line(row), flush=True)
        self._write()
        return row

    def skip(self, what: str, reason: str) -> None:
        """Something that this machine cannot measure. It is in the document too."""
        self._skipped.append({"what": what, "reason": reason})
        print(f"{what:58} skipped: {reason}", flush=True)

    def note(self, name: str, value: Any) -> None:
        """Goes into the document under `name`."""
        self._extra[name] = value

    def _fail(self, what: str, error: BaseException) -> None:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_REASON_LENGTH]
        self._failed.append({"what": what, "reason": reason})
        print(f"{what:58} FAILED: {reason}", flush=True)
        print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)

    def _write(self, *, complete: bool = False) -> dict[str, Any]:
        document = self.document() | {"complete": complete}
        if self._json is not None:
            write_document(self._json, document)
        return document

    @functools.cached_property
    def _card(self) -> dict[str, Any]:
        return card() | device_card(self.device)

    def document(self) -> dict[str, Any]:
        return {
            "bench": self._bench,
            "suite": "micro",
            "mode": "quick" if self.quick else "full",
            "wall_s": time.perf_counter() - self._began,
            "ceilings": None if self.ceilings is None else self.ceilings.as_dict(),
            "rows": self._rows,
            "skipped": self._skipped,
            "wrong": self._wrong,
            "failed": self._failed,
            **self._extra,
            "card": self._card,
        }


OVERLAP = "max(sum of flops / gemm_flops_per_s, sum of read_bytes / read_bytes_per_s + moved_bytes / copy_bytes_per_s)"
SERIAL = (
    "sum over work of max(flops / gemm_flops_per_s, read_bytes / read_bytes_per_s + moved_bytes / copy_bytes_per_s)"
)


def _line(row: Mapping[str, Any]) -> str:
    seconds = row["seconds"]
    text = f"{row['what']:58} {_time(seconds['median'])} ({_time(seconds['p5'])} to {_time(seconds['p95'])})"
    if row["floor_s"] is not None:
        text += f"  floor {_time(row['floor_s'])}  {row['of_floor']:5.2f} of it"
    if row.get("sustained_floor_s") is not None:
        text += f"  sustained {_time(row['sustained_floor_s'])}  {row['of_sustained_floor']:5.2f}"
    for name, ratio in row["over_peers"].items():
        text += f"  {name} {ratio:.2f}x"
    return text


def _time(seconds: float) -> str:
    for unit, size in (("s ", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:7.2f} {unit}"
    return f"{seconds * 1e6:7.2f} us"

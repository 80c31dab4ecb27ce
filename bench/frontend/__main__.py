"""Cost of a streamed token in the server's process: 256 streams through the real HTTP server and the real front.

Only the instance is scripted: it sends one message of tokens a step over the real channel, so detokenising, rendering,
waking and writing are what a client's token goes through. Beside it, in turns within the same run, servers that stream
the same bytes: `naive` (aiohttp, a queue and one write a token, no text to be made) and `socket` (bare transports of
the loop; what the kernel takes for the writes is in there, and no server can do with less). Figures are
CPU microseconds of the server's process per streamed token while all streams run (user and system time; the client
and the instance are other processes), the lag of its loop, sampled every 10 ms, and the time to a stream's first byte,
which includes up to a step of waiting.
`python -m bench.frontend [--quick]`; the last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.common import ROOT, card, emit, write_document
from bench.frontend.client import Streams, request_bytes

KINDS = ("front", "naive", "socket")
SETTLED = 3  # events of every stream before the measurement begins, and tokens left when it ends
_READY = "ready on "
_LIMIT_S = 60.0


class Served:
    """A running server."""

    def __init__(self, kind: str, step_s: float, num_tokens: int) -> None:
        command = [sys.executable, "-m", "bench.frontend.server", kind]
        self._process = subprocess.Popen(
            [*command, "--step-s", repr(step_s), "--tokens", str(num_tokens)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        said: list[str] = []
        for line in self._process.stderr:
            if line.startswith(_READY):
                self.url = line.removeprefix(_READY).strip()
                return
            said.append(line)
        raise RuntimeError(f"the {kind} server did not start:\n{''.join(said)}")

    def usage(self) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


class Window:
    """Asks the server for its usage when all streams run and before the first one ends."""

    def __init__(self, served: Served, streams: Streams, num_tokens: int) -> None:
        self._served, self._streams, self._num_tokens = served, streams, num_tokens
        self.began: tuple[int, float, dict[str, Any]] | None = None
        self.ended: tuple[int, float, dict[str, Any]] | None = None

    def look(self) -> None:
        counts = [stream.events for stream in self._streams.streams]
        if self.began is None and min(counts) >= SETTLED:
            self.began = sum(counts), time.perf_counter(), self._served.usage()
        if self.began is not None and self.ended is None and max(counts) >= self._num_tokens - SETTLED:
            self.ended = sum(counts), time.perf_counter(), self._served.usage()

    def document(self) -> dict[str, Any]:
        if self.began is None or self.ended is None:
            raise ValueError("the streams did not all run at the same time; ask for more tokens")
        (first, began_s, before), (last, ended_s, after) = self.began, self.ended
        count, lags = last - first, sorted(after["lags_s"])
        user, system = (after[part] - before[part] for part in ("user_s", "system_s"))
        waits = sorted(stream.first_s - stream.sent_s for stream in self._streams.streams if stream.first_s is not None)
        return {
            "tokens": count,
            "tokens_per_s": count / (ended_s - began_s),
            "us_per_token": (user + system) / count * 1e6,
            "user_us_per_token": user / count * 1e6,
            "busy": (user + system) / (ended_s - began_s),
            "lag_p99_ms": at(lags, 0.99) * 1e3,
            "lag_max_ms": lags[-1] * 1e3 if lags else 0.0,
            "first_byte_p50_ms": at(waits, 0.5) * 1e3,
            "first_byte_p99_ms": at(waits, 0.99) * 1e3,
        }


def at(ascending: list[float], share: float) -> float:
    return ascending[min(int(share * len(ascending)), len(ascending) - 1)] if ascending else 0.0


def measure(served: Served, options: argparse.Namespace) -> dict[str, Any]:
    fields: dict[str, object] = {"stream": True, "max_tokens": options.tokens}
    streams = Streams(served.url, options.streams, request_bytes(fields))
    window = Window(served, streams, options.tokens)
    streams.run(window.look, _LIMIT_S)
    streams.check(options.tokens)
    return window.document()


def run(options: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, Any]]] = {kind: [] for kind in options.kinds}
    servers = {kind: Served(kind, options.step_ms / 1e3, options.tokens) for kind in options.kinds}
    try:
        print(HEADER)
        for _ in range(options.rounds):
            for kind, served in servers.items():
                rounds[kind].append(measure(served, options))
                show(kind, rounds[kind][-1])
    finally:
        for served in servers.values():
            served.stop()
    medians = {
        kind: {name: median(found[name] for found in values) for name in values[0]} for kind, values in rounds.items()
    }
    ours = medians.get("front")
    ratios = {kind: ours["us_per_token"] / other["us_per_token"] for kind, other in medians.items()} if ours else {}
    for kind, values in medians.items():
        show(f"{kind}, median", values)
    return {
        "bench": "frontend",
        "streams": options.streams,
        "tokens": options.tokens,
        "step_ms": options.step_ms,
        "medians": medians,
        "ratio_to": ratios,
        "rounds": rounds,
        "card": card(),
    }


HEADER = (
    f"{'server':14} {'tok/s':>7} {'us/tok':>7} {'user':>6} {'busy':>5} {'lag p99':>8} {'max ms':>7} "
    f"{'first byte':>10} {'p99 ms':>7}"
)


def show(name: str, row: dict[str, Any]) -> None:
    print(
        f"{name:14} {row['tokens_per_s']:7.0f} {row['us_per_token']:7.1f} {row['user_us_per_token']:6.1f} "
        f"{row['busy']:5.2f} {row['lag_p99_ms']:8.1f} {row['lag_max_ms']:7.1f} "
        f"{row['first_byte_p50_ms']:10.0f} {row['first_byte_p99_ms']:7.0f}",
        flush=True,
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=160, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=25.0, help="time between two tokens of a stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS), help="which servers")
    parser.add_argument("--quick", action="store_true", help="one round, a few seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the document there too")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.tokens = 1, 120
    return options


def main() -> None:
    options = parse()
    document = run(options)
    if options.json is not None:
        write_document(options.json, document)
    emit(document)


if __name__ == "__main__":
    main()

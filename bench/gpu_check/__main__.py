"""Everything that only a machine with a GPU can say: builds the extension, runs the tests, measures. `make gpu-check`.

Takes the source tree as it is and the Python that runs it: no network, no virtual environment; packages that are
missing come from .whl/ (`make gpu-wheels`). The parts are in bench/gpu_check/plan.py: the first call has what says
most, `--second` the rest, `--full` all sizes, `--decide` what decides the next steps. A card, driver or package that no
check has run on is named before anything runs. One that fails or hangs takes nothing from the others, and all of them
together end within `--budget` seconds. DIR gets gpu-check.tar.gz, with every part's output, one JSON document per
benchmark and check.json, and summary.md beside it; both are refreshed after every part, every few seconds of one and on
a signal. The last line says what failed; the exit status is 0 only if nothing did and all tests and the build ran, 2 if
it refused to start, 128 and more after a signal.

Knows what is kept and said; not what is run, nor how anything is tested or measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.common import ROOT, commit
from bench.gpu_check import answers, outcomes, wheels
from bench.gpu_check.archive import ARCHIVE, SITE, SUMMARY, Archive
from bench.gpu_check.commands import INI, Setup
from bench.gpu_check.machine import (
    OPTIONAL,
    PACKAGES,
    Machine,
    known,
    look,
    too_old,
    unknown,
    unknown_packages,
    versions,
)
from bench.gpu_check.plan import BUDGET_S, CALLS, DECIDE, SUMMARY_S, chosen, parts_of
from bench.micro.parts import ENDING, Interrupted, Outcome, Part, Runner, ended_by_signals, missing
from bench.summary import table

_BAD = ("failed", "out of time", "interrupted")
Plan = Callable[[str, Setup], list[Part]]


class Refused(Exception):
    """The check was not started; the message says why."""


class Check:
    """A call: its parts and their results so far."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self._options, self._scratch = options, scratch
        self._archive = Archive(options.dir.resolve(), scratch)
        self._runner = Runner(scratch, options.budget, reserve_s=SUMMARY_S, keep=self.keep)
        self._machine = Machine("nobody has looked yet", "", "", None)
        self._remarks: list[str] = []
        self._commit = commit()
        self.unkept = ""  # why the archive does not have the latest results

    def run(self, find: Callable[[], Machine], plan: Plan) -> None:
        """Raises `Refused`, or `Interrupted` after a signal."""
        self.keep()
        if self.unkept:
            raise Refused(f"nothing can be written to {self._options.dir}: {self.unkept}")
        try:
            (self._scratch / "pytest.ini").write_text(INI, encoding="utf-8")
        except OSError as error:
            raise Refused(f"nothing can be written to {self._scratch}: {error}") from None
        self._machine = find()
        print(f"{versions()}\nGPU: {self._machine.gpu or 'none'}; nvcc: {self._machine.nvcc or 'none'}", flush=True)
        if not self._machine.usable:
            raise Refused(f"no GPU: {self._machine.problem}")
        print(f"known: {known()}", flush=True)
        self._not_known(unknown(self._machine))
        options = self._options
        setup = Setup(self._scratch, self._machine, options.jobs)
        calls = [options.call, *(call for call in CALLS if options.only and call != options.call)]
        named: dict[str, Part] = {}
        for part in (part for call in calls for part in plan(call, setup)):
            named.setdefault(part.name, part)  # of this call, where another has one of that name
        try:
            parts = chosen([*named.values()], options.only, options.skip)
        except ValueError as error:
            raise Refused(str(error)) from None
        self._provide(parts)
        self._not_known(unknown_packages())
        self._runner.run(parts)

    def _not_known(self, found: Sequence[str]) -> None:
        for text in found:
            self._remarks.append(f"not known: {text}")
            print(f"not known: {text}", flush=True)

    def _provide(self, parts: Sequence[Part]) -> None:
        """Packages that are absent or too old, from wheels; without them, but for those that are optional, it is
        refused to start."""
        needed = {name for part in parts for name in part.packages} | {"pytest_timeout", "xdist"}
        wanted = [name for name in PACKAGES if name in needed and (missing((name,)) or too_old(name))]
        site = self._scratch / SITE
        problem = wheels.install(wanted, wheels.FOLDER, site)
        if left_out := wheels.install([name for name in OPTIONAL if missing((name,))], wheels.FOLDER, site):
            self._remarks.append(f"FlashInfer is left out, its wheels cannot be installed: {left_out}")
        sys.path.insert(0, str(site))
        importlib.invalidate_caches()
        paths = (str(site), str(ROOT), str(ROOT / "kernels"), *filter(None, (os.environ.get("PYTHONPATH"),)))
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.environ["FLASHINFER_DISABLE_JIT"] = "1"  # compiling one of its kernels takes longer than a test may
        if problem:
            raise Refused(f"wheels of {wheels.FOLDER} cannot be installed: {problem}")
        absent = missing(wanted)
        old = [text for name in wanted if name not in absent and (text := too_old(name))]
        self._remarks += [f"{text}: it may do" for text in old]
        if absent:
            lacking = ", ".join(f"{name} (without it goes: {PACKAGES[name][1]})" for name in absent)
            raise Refused(
                f"missing: {lacking}. Where there is a network, run `make gpu-wheels`, and carry the folder "
                f"{wheels.FOLDER.name}/ along with the source tree"
            )
        if build := [text for text in old if text.split()[0] in ("setuptools", "pybind11")]:
            raise Refused(f"{build[0]}, which the build needs: run `make gpu-wheels` where there is a network")

    # ---- what is kept

    def keep(self) -> None:
        """Writes the results so far, as far as the disk allows; `unkept` says where it does not."""
        try:
            documents, problems = table.read(self._scratch)
            summary = table.table(documents, [*self.notes(), *problems])
            made = {"check.json": json.dumps(self._document(), indent=1) + "\n", SUMMARY: summary}
            self._archive.refresh({name: text.encode() for name, text in made.items()})
            self.unkept = ""
        except OSError as error:
            self.unkept = str(error)
            print(f"nothing can be kept: {error}", file=sys.stderr, flush=True)

    def finish(self, said: str) -> int:
        """The last archive, with the picture, and the exit status but for a refusal and a signal."""
        self._remarks.insert(0, said or self.verdict())
        self.keep()
        try:
            table.write(self._scratch, self.notes())
            self.keep()
        except OSError as error:
            print(f"there is no picture: {error}", file=sys.stderr, flush=True)
        if self.lost:
            print(f"not kept: {self.unkept}; what the parts wrote is in {self._scratch}")
        elif not self.unkept:
            print(f"{self._options.dir / ARCHIVE}\n{self._options.dir / SUMMARY}")
        print(f"gpu-check, {self._runner.elapsed_s:.0f} s: {said or self.verdict()}", flush=True)
        return 1 if self._bad() or self.unkept else 0

    @property
    def lost(self) -> bool:
        """Parts have run, and the archive does not have all of them."""
        return bool(self.unkept and self._runner.outcomes)

    def _document(self) -> dict[str, Any]:
        parts = [asdict(outcome) for outcome in self._outcomes()]
        document: dict[str, Any] = {"machine": asdict(self._machine), "versions": versions()}
        return document | {"call": self._options.call, "commit": self._commit, "parts": parts}

    def _outcomes(self) -> list[Outcome]:
        return [*self._runner.outcomes.values()]

    def _bad(self) -> list[str]:
        found = [o.name for o in self._outcomes() if o.state in _BAD]
        return found + [o.name for o in self._outcomes() if o.state == "not run" and _must_run(o.name)]

    def verdict(self) -> str:
        bad = self._bad()
        left = [o.name for o in self._outcomes() if o.state == "not run" and o.name not in bad]
        text = f"failed: {', '.join(bad)}" if bad else "nothing failed"
        return text + (f"; not run: {', '.join(left)}" if left else "")

    def notes(self) -> list[str]:
        """Lines of the summary: each part, the answers of the decisive call, and of tests what failed and why."""
        lines = [*self._remarks, f"{self._machine.gpu or 'no GPU'}; {versions()}; call: {self._options.call}"]
        for outcome in self._outcomes():
            lines.append(f"**{outcome.name}**: {outcome.state}, {outcome.seconds:.0f} s. {outcome.said}".rstrip(". "))
        if self._options.call == DECIDE:
            lines += answers.lines(self._scratch)
        for path in sorted(self._scratch.glob("*.jsonl")):
            lines += outcomes.summary(path.stem, outcomes.read(path))
        return lines


def _must_run(name: str) -> bool:
    return name.startswith(("build", "tests"))


def check(options: argparse.Namespace, find: Callable[[], Machine] = look, plan: Plan = parts_of) -> int:
    scratch = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    call = Check(options, scratch)
    said, status = "", 0
    with ended_by_signals():
        try:
            call.run(find, plan)
        except Refused as refusal:
            said, status = f"refused. {refusal}", 2
        except Interrupted as interruption:
            said, status = f"ended by {interruption}; {call.verdict()}", 128 + interruption.number
        finally:
            for number in ENDING:  # what there is, is kept
                signal.signal(number, signal.SIG_IGN)
            found = call.finish(said)
            if not call.lost:
                shutil.rmtree(scratch, ignore_errors=True)
    return status or found


def main(argv: Sequence[str] | None = None, find: Callable[[], Machine] = look, plan: Plan = parts_of) -> int:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=ROOT / "build" / "gpu-check", help="where the results go")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="of all parts together")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2, help="files compiled at once")
    call = parser.add_mutually_exclusive_group()
    call.add_argument("--second", dest="call", action="store_const", const="second", help="what the first call left")
    call.add_argument("--full", dest="call", action="store_const", const="full", help="all sizes")
    text = "what decides the next steps, each with a question (bench/gpu_check/decide.py)"
    call.add_argument("--decide", dest="call", action="store_const", const=DECIDE, help=text)
    parser.set_defaults(call=CALLS[0])
    parser.add_argument(
        "--only", type=words, default=[], help="parts of all calls with commas: build,tests,colocate,..."
    )
    parser.add_argument("--skip", type=words, default=[], help="parts to leave out")
    return check(parser.parse_args(argv), find, plan)


if __name__ == "__main__":
    sys.exit(main())

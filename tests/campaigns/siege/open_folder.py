"""Opens hostile folders, each in a process of its own, and judges what came of it. Does not know what is in them."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra_engine.errors import HydraError
from tests.campaigns.siege.folders import GIB, HostileFolder, hostile_folders

MAX_SECONDS = 60.0  # of wall time on a busy machine; nothing takes more than a few
MAX_BYTES = GIB  # of one process
REFUSED = (3, 4)
SAID = "said: "
_CHILD = "--child"  # before the folder and the words of the process that opens one
WAITED = "did not answer in time"  # of a child that only its parent's patience has ended


@dataclass(frozen=True)
class Outcome:
    """`status`: of the process, None where it did not end. `peak`: bytes of its largest process. `waited`: a child took
    what it liked until its parent had enough."""

    status: int | None
    sentence: str
    seconds: float
    peak: int
    canary: bool
    waited: bool

    def problem(self, folder: HostileFolder) -> str | None:
        """None where all is well."""
        if self.status is None:
            return f"it hangs, after {self.sentence!r}"
        if self.canary:
            return "the canary was touched"
        if self.waited:
            return "a child has no limit of its own"
        if self.peak > MAX_BYTES:
            return f"it took {self.peak >> 20} MiB"
        allowed = REFUSED if folder.words is None else (0, *REFUSED)  # what costs much may be found before it is asked
        if self.status not in allowed or not self.sentence:
            return f"exit status {self.status}, said {self.sentence!r}"
        return None


def opened(folder: HostileFolder, miniature: Path, place: Path) -> Outcome:
    """Opens the folder and tells what came of it. `place` is an empty folder, that of the canary."""
    model = place / "model"
    shutil.copytree(miniature, model)
    folder.change(model)
    command = [
        sys.executable,
        "-m",
        "tests.campaigns.siege.open_folder",
        _CHILD,
        str(model),
        *([folder.words] if folder.words else []),
    ]
    variables = os.environ | {"XDG_CACHE_HOME": str(place / "cache"), "PYTHONPATH": str(Path(__file__).parents[3])}
    begun = time.monotonic()
    output = place / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=place,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    status: int | None = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        status = process.wait(MAX_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    sentence = next((line.removeprefix(SAID) for line in lines if line.startswith(SAID)), "")
    peak = next((int(line.removeprefix("peak: ")) for line in lines if line.startswith("peak: ")), 0)
    waited = any(WAITED in line for line in lines)
    return Outcome(status, sentence, time.monotonic() - begun, peak, (place / "canary").exists(), waited)


def main(names: Sequence[str] | None = None) -> None:
    names = sys.argv[1:] if names is None else names
    folders = {name: folder for name, folder in hostile_folders().items() if not names or name in names}
    failed = 0
    with tempfile.TemporaryDirectory() as top:
        for family in {folder.family for folder in folders.values()}:
            subprocess.run(
                [sys.executable, "-m", "tools.miniatures", "--family", family, str(Path(top, family))], check=True
            )
        for number, (name, folder) in enumerate(folders.items()):
            place = Path(top, str(number))
            place.mkdir()
            outcome = opened(folder, Path(top, folder.family), place)
            problem = outcome.problem(folder)
            failed += problem is not None
            verdict = "held  " if problem is None else "FAILED"
            print(
                f"{verdict} {outcome.seconds:5.1f} s {outcome.peak >> 20:5} MiB  {name}: {problem or outcome.sentence}"
            )
            sys.stdout.flush()
            shutil.rmtree(place)
    print(f"{len(folders) - failed} of {len(folders)} held")
    sys.exit(bool(failed))


def _open(model: str, words: str | None) -> int:
    """Starts an engine here; where there are `words`, tries a chat that must fail between two that must not."""
    from hydra_engine import Engine
    from hydra_engine.errors import RequestError

    try:
        with Engine(model, max_model_len=256, device="cpu", progress=False) as engine:
            options = {"max_tokens": 1, "ignore_eos": True}
            engine.chat([{"role": "user", "content": "hello"}], **options)
            if words is None:
                return 0
            for _ in range(2):
                try:
                    engine.chat([{"role": "user", "content": words}], **options)
                    return 0
                except RequestError as error:
                    print(f"{SAID}{error}", flush=True)
                engine.chat([{"role": "user", "content": "hello"}], **options)
            return 0
    except HydraError as error:
        print(f"{SAID}{error}", flush=True)
        return error.exit_code
    finally:
        own = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        peak = max(int(own.split()[1]), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
        print(f"peak: {peak << 10}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == [_CHILD]:
        sys.exit(_open(sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None))
    main()

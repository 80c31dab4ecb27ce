"""Hooks and fixtures of all tests."""

import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from random import Random

import pytest

from tests import forkserver
from tests.examples import register_profiles

register_profiles()
# A shell without job control starts what runs in the background with this signal ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
forkserver.install()
# Ten thousand tests and what they import are no garbage.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--drawn", action="store_true", help="of slow tests marked as drawn, a third of the cases only")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Processes that share the tests must call them the same. Of a test marked as quick in some cases the others are
    slow. With --drawn, of one marked as drawn the commit draws the slow cases that are run."""
    for item in items:
        quick = item.get_closest_marker("quick")
        if quick is not None and not any(word in item.name for word in quick.args):
            item.add_marker("slow")
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(
                f"a test's name has an address in it, which differs between processes: {item.nodeid}"
            )
    if config.getoption("drawn"):
        left_out = cases_left_out(items)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


def cases_left_out(items: list[pytest.Item]) -> set[str]:
    """Two thirds of each drawn test's slow cases, the same in all processes of a commit."""
    from bench.common import commit

    cases: dict[str, list[str]] = {}
    for item in items:
        if item.get_closest_marker("drawn") and item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item.nodeid)
    random = Random(commit() or "")
    return {case for test in sorted(cases) for case in random.sample(sorted(cases[test]), len(cases[test]) * 2 // 3)}


@pytest.hookimpl(specname="pytest_collection_modifyitems", trylast=True)
def pytest_folder_by_folder(items: list[pytest.Item]) -> None:
    """Keeps each folder's tests together: a browser and a process that interprets kernels are shared by a folder,
    and each process of pytest that meets one of its tests starts its own."""
    folders = {item.path.parent: None for item in items}
    place = {folder: number for number, folder in enumerate(folders)}
    items.sort(key=lambda item: place[item.path.parent])


def pytest_collection_finish() -> None:
    """Freezes what was loaded: full collections, which some tests ask for, skip it. Looking for garbage in it first
    would take a second."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # what libraries look for when the interpreter ends
    gc.enable()
    # Of two processes side by side each would wait for both processors at every operation. Instances set their own.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    # Here and not in the middle of a test that counts descriptors.
    if "PYTEST_XDIST_WORKER" in os.environ and forkserver.EXEC_VARIABLE not in os.environ:
        forkserver.running()
        forkserver.running_small()


def pytest_sessionfinish() -> None:
    forkserver.close()


@pytest.fixture(autouse=True)
def what_commands_set() -> Iterator[None]:
    """Entry points set up the log, the collector and torch's threads of their process, which is that of all tests."""
    log, folder, thresholds = logging.getLogger("hydra_engine"), os.getcwd(), gc.get_threshold()
    before = list(log.handlers), log.level, log.propagate, logging.raiseExceptions
    yield
    log.handlers[:], log.level, log.propagate, logging.raiseExceptions = before
    gc.set_threshold(*thresholds)
    os.chdir(folder)
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="module")
def started_in_full() -> Iterator[None]:
    """Starts processes without the forkserver, for tests that look at a process from outside: its children are its
    own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(forkserver.EXEC_VARIABLE, "1")
        yield

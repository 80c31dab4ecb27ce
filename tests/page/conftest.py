"""Debian's chromium, a page of its own for each test, and an engine: a scripted one here, the demo model in a process.

Whatever a test does, its page must log no error that the test does not expect and ask no other origin for anything.
Screenshots go to build/screenshots.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.config import ServerConfig
from hydra_engine.server.app import build_app
from hydra_engine.server.http.listening import listen
from hydra_engine.server.state import STATE
from tests.server.stub import StubEngine

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "build" / "screenshots"
PICTURES = ROOT / "hydra_engine" / "demo" / "pictures"
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt install chromium")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """A page, the elements that tests find by their mark, and the problems in it."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url.rstrip("/")
        self.problems: list[str] = []
        self.expected: tuple[str, ...] = ()  # parts of messages that this test brings about
        page.set_default_timeout(40_000)
        page.on("console", lambda m: self.problems.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", self._check_origin)

    def _check_origin(self, request: Any) -> None:
        if not request.url.startswith((self.url + "/", "data:", "blob:" + self.url)):
            self.problems.append(f"another origin: {request.url[:100]}")

    def open(self, state: str = "open") -> Tab:
        self.page.goto(self.url + "/")
        self.wait(f"[data-testid=connection][data-state={state}]")
        return self

    def get(self, mark: str) -> Any:
        return self.page.get_by_test_id(mark)

    def wait(self, selector: str, **options: Any) -> Any:
        return self.page.wait_for_selector(selector, **options)

    def wait_for(self, expression: str) -> None:
        """Playwright's own way evaluates text in the page, which its policy forbids."""
        deadline = time.monotonic() + 40
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            self.page.wait_for_timeout(20)

    def until(self, happened: Callable[[], bool]) -> None:
        """Waits for what happens elsewhere."""
        deadline = time.monotonic() + 40
        while not happened():
            assert time.monotonic() < deadline, "it never happened"
            self.page.wait_for_timeout(20)

    def press(self, name: str, **options: Any) -> None:
        """The button of this name."""
        self.page.get_by_role("button", name=name, exact=True, **options).click()

    def ask(self, text: str) -> None:
        self.get("prompt").fill(text)
        self.get("send").click()

    def answered(self) -> str:
        """The text of the last answer, once it is complete."""
        self.wait(".message.assistant:last-child:not(.busy) [data-testid=answer-timeline]")
        return str(self.get("answer").last.inner_text())

    def shot(self, name: str, **options: Any) -> None:
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", **options)


OpenTab = Callable[..., Tab]


@pytest.fixture
def new_tab(browser: Any) -> Iterator[OpenTab]:
    """`new_tab(url, view, **options of the browser's context)`; without a view it is a first visit."""
    tabs: list[Tab] = []

    def start(url: str, view: str = "split", **options: Any) -> Tab:
        context = browser.new_context(**({"viewport": {"width": 1440, "height": 900}} | options))
        if view:
            context.add_init_script(f"localStorage['hydra.mode'] ??= {view!r}")
        tabs.append(Tab(context.new_page(), url))
        return tabs[-1]

    yield start
    problems = [p for tab in tabs for p in tab.problems if not any(words in p for words in tab.expected)]
    for tab in tabs:
        tab.page.context.close()
    assert problems == []


@dataclass
class Scripted:
    """The real server before the scripted engine, on a loop in a thread of its own."""

    engine: StubEngine = field(default_factory=StubEngine)
    url: str = ""


class Loop:
    """An event loop in a thread of its own, with the servers on it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._closers: list[Any] = []

    def serve(self, engine: StubEngine | None = None, **options: Any) -> Scripted:
        served = Scripted(engine or StubEngine())

        async def listen_here() -> None:
            app = build_app(served.engine, ServerConfig(**options))
            served.engine.add_observer(app[STATE].metrics.requests.add)
            listening = await listen(app, "127.0.0.1", 0)
            self._closers.append(listening)
            served.url = listening.url

        asyncio.run_coroutine_threadsafe(listen_here(), self._loop).result(30)
        return served

    def close(self) -> None:
        for listening in self._closers:
            asyncio.run_coroutine_threadsafe(listening.close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def scripted() -> Iterator[Callable[..., Scripted]]:
    """`scripted(api_key=("k",))` serves with these options."""
    loop = Loop()
    yield loop.serve
    loop.close()


@pytest.fixture(scope="package")
def shared_server() -> Iterator[Scripted]:
    """A server for all tests that need no options."""
    loop = Loop()
    yield loop.serve()
    loop.close()


@pytest.fixture
def served(shared_server: Scripted) -> Scripted:
    """The shared server with a new stub engine that has the same observers."""
    engine = shared_server.engine
    observers = engine.observers
    engine.__dict__ |= StubEngine(observers=observers).__dict__
    return shared_server

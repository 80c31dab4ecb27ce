"""The examples run as they are, and what they print is what the demo should say."""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn

from hydra_engine.core.outputs import Result
from tools.run_notebook import run_cell

EXAMPLES = Path(__file__).parents[2] / "examples"
PICTURES = EXAMPLES.parent / "hydra_engine" / "demo" / "pictures"
SHAPES = "a blue triangle in the top-centre, a pink star in the middle-left and a yellow star in the bottom-right"
STARS = f"There is {SHAPES}."
SAID = {
    "captions": ["diamonds.png: There is a red circle", "shapes.png: There is a blue star", f"stars.png: {STARS}"],
    "streaming": [
        f"{STARS}\nfirst token after ",
        ", 24 tokens\n",
        "There is a blue triangle in the top-centre, ... that",
    ],
    "json_from_picture": ["{'answer': 'There are three objects.'}\n"],
    "conversation": [
        "How many objects are there? There are four objects.\n",
        "How many red objects are there? There are two red objects.\n",
        "What color is the star? The star is yellow.\n    62 tokens, 32 of them from the cache\n",
    ],
    "video_frames": [" tokens of prompt, 40 of them are the video's\n"],
    "topology": ["instance ep0 serves EP", "instance d0 serves D", STARS, "\nencode  ", "\npull_kv  ", "\ndecode  "],
}


def test_each_is_listed_and_tested() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert files == {f"{name}.py" for name in SAID} | {"fastapi_app.py", "timelines.ipynb"}
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"| [{name}]({name}) |" in index for name in files)


@pytest.mark.quick("conversation")
@pytest.mark.parametrize("name", SAID)
def test_it_says_what_it_should(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr()
    for words in SAID[name]:
        assert words in printed.out
    assert ("3/3" in printed.err) == (name == "captions")


@pytest.mark.slow
async def test_a_fastapi_application_answers_and_shuts_down() -> None:
    app = runpy.run_path(str(EXAMPLES / "fastapi_app.py"), run_name="fastapi_app")["app"]
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():  # noqa: ASYNC110 - it has no event for that
        await asyncio.sleep(0.01)
    (port,) = {socket.getsockname()[1] for one in server.servers for socket in one.sockets}
    picture = (PICTURES / "stars.png").read_bytes()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        async with session.post("/ask", params={"question": "Describe the picture."}, data=picture) as answer:
            assert (answer.status, (await answer.json())["answer"]) == (200, STARS)
        async with session.post("/stream", params={"question": "What is two plus three?"}) as answer:
            assert (answer.status, await answer.text()) == (200, "Two plus three is five.")
        for route in ("/ask", "/stream"):
            async with session.post(route, params={"question": "?"}, data=b"no picture") as answer:
                assert answer.status == 400 and "format" in (await answer.json())["error"]
    engine = app.state.engine
    server.should_exit = True
    await asyncio.wait_for(serving, 20)
    assert engine.health() == (False, "closed") and not server.lifespan.shutdown_failed


async def test_the_notebooks_cells_run_under_a_running_loop() -> None:
    notebook = json.loads((EXAMPLES / "timelines.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    shown = [await run_cell("".join(cell["source"]), names) for cell in cells]
    first, second, many, last = [one for one in shown if one is not None]
    assert first.text == STARS and second.text == "The star is yellow." and second.usage.cached_images == 1
    assert [len(result.text) > 10 for result in many] == [True] * 4 and last is many[-1]
    for result in (first, second, last):
        assert isinstance(result, Result)
        html = result._repr_html_()
        assert result.text in html and "<svg" in html and "<title>decode " in html
    assert names["engine"].health() == (False, "closed")
    stored = [output["data"] for cell in cells for output in cell["outputs"]]  # as `python -m tools.run_notebook` does
    for result, data in zip((first, second, last), (data for data in stored if "text/html" in data), strict=True):
        html = "".join(data["text/html"])
        assert result.text in html and "<svg" in html, "the stored outputs are of another version: run the tool"

"""`hydra-engine run-batch` as a person types it, on the demo model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.__main__ import main
from tests.cli.conftest import Here
from tests.cli.terminal import Terminal
from tests.cli.test_commands import ROOT, hydra

RIGHT = "Two plus three is five."


def request(name: str, text: str = "What is two plus three?", **fields: Any) -> str:
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n"


def answers(text: str) -> dict[str, Any]:
    return {one["custom_id"]: one["response"]["body"] for one in map(json.loads, text.splitlines())}


def test_a_file_in_a_file_out(tmp_path: Path, here: Here) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(request(f"r{i}") for i in range(20)) + "\n\n", encoding="utf-8")
    done = here("run-batch", str(source), "-o", str(target), "--threads", "1", "--max-concurrent", "4")
    assert done.returncode == 0 and done.stdout == "", done.stderr
    found = answers(target.read_text(encoding="utf-8"))
    assert found.keys() == {f"r{i}" for i in range(20)}
    assert all(body["choices"][0]["message"]["content"] == RIGHT for body in found.values())
    assert "20 requests in " in done.stderr and "0 of them failed" in done.stderr


def test_the_document_s_example_works_as_pasted(tmp_path: Path, here: Here) -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    (block,) = (block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "run-batch" in block)
    *before, command = block.strip().splitlines()
    subprocess.run(["bash", "-c", "\n".join(before)], cwd=tmp_path, check=True, timeout=20)
    with contextlib.chdir(tmp_path):
        done = here(*shlex.split(command)[1:], "--threads", "1")
    assert done.returncode == 0, done.stderr
    found = answers((tmp_path / "answers.jsonl").read_text(encoding="utf-8"))
    assert found["a"]["choices"][0]["message"]["content"] == RIGHT and found["b"]["choices"][0]["text"]


def test_failed_lines_make_the_exit_code_and_pipes_do() -> None:
    lines = request("a", model="mine") + "nonsense\n" + request("b", model="other")
    done = hydra("run-batch", "-", "-o", "-", "--threads", "1", "--served-model-name", "mine", stdin=lines)
    assert done.returncode == 1, done.stderr
    found = answers(done.stdout)
    assert found["a"]["choices"][0]["message"]["content"] == RIGHT
    assert "not valid JSON" in found[None]["error"]["message"] and found["b"]["error"]["code"] == "model_not_found"
    assert "3 requests in " in done.stderr and "2 of them failed" in done.stderr
    assert re.search(r"a second\); the first one, line [23]: (?!line)[^\n]+\n$", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ("no-such-file", "-o", "-"),
            2,
            "the file of requests no-such-file cannot be opened: no such file or directory",
        ),
        (("{file}", "-o", "{file}"), 2, "must not be the file of requests"),
        (("{file}", "-o", "/no/such/folder/x"), 2, "the file of answers /no/such/folder/x cannot be opened"),
        (("{file}", "-o", "-", "--max-concurrent", "0"), 2, "--max-concurrent must be from 1 to 512"),
        (("{file}", "-o", "-", "--model", "no-such-folder"), 3, "no model directory"),
        (("{file}",), 2, "-o/--output"),
        (("{folder}/prose.md", "-o", "{file}"), 2, "has no line that is a JSON object, see line 2; a line is for"),
    ],
)
def test_what_is_wrong_with_the_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, words: str
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(request("a"), encoding="utf-8")
    (tmp_path / "prose.md").write_text("\n# Read me\n[1]\n", encoding="utf-8")
    try:
        found: Any = main(["run-batch", *(one.format(file=file, folder=tmp_path) for one in arguments)])
    except SystemExit as ended:
        found = ended.code
    told = capfd.readouterr()
    assert (found, told.out) == (code, "") and words in told.err and "Traceback" not in told.err
    assert file.read_text(encoding="utf-8") == request("a")


@pytest.mark.slow
def test_a_terminal_shows_a_bar_and_an_interrupt_keeps_what_was_answered(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = (request(f"r{i}", max_tokens=200, ignore_eos=True) for i in range(2000))
    source.write_text("".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "hydra_engine", "run-batch", str(source), "-o", str(target), "--threads", "1"]
    with Terminal(command, cwd=str(ROOT), environment=dict(os.environ)) as terminal:
        terminal.until("/2000 [")
        terminal.until("tok/s")
        terminal.type("\x03")
        assert terminal.ended() == 130, terminal.raw[-1500:]
        assert "Traceback" not in terminal.raw
    kept = answers(target.read_text(encoding="utf-8"))
    assert 0 < len(kept) < 2000 and all("choices" in body for body in kept.values())

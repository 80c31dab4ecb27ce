"""Completion scripts: bash really completes with one, the others name the same flags."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from hydra_engine.__main__ import main
from hydra_engine.cli.commands import build_parser
from tests.cli.terminal import Terminal


@cache
def script(shell: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["completion", shell]) == 0
    return out.getvalue()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "completion.bash"
    file.write_text(script("bash"))
    return file


def completions(source: Path, line: str) -> set[str]:
    """Words that bash offers for the last word of `line`, through the function that the script registers."""
    words = line.split(" ")
    code = (
        f"source {source}\ncomplete -p hydra-engine >/dev/null || exit 3\n"
        f"COMP_WORDS=({' '.join(words[:-1])} '{words[-1]}')\nCOMP_CWORD={len(words) - 1}\n_hydra_engine\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("hydra-engine s", {"serve"}),
        ("hydra-engine co", {"config", "completion"}),
        ("hydra-engine serve --max-num", {"--max-num-seqs"}),
        ("hydra-engine serve --no-st", {"--no-steal-decodes"}),
        ("hydra-engine serve --dtype b", {"bfloat16"}),
        ("hydra-engine serve --generation-config ", {"auto", "none"}),
        ("hydra-engine serve --port ", set()),
        ("hydra-engine serve --config ", set()),  # left to the shell's own completion of paths
        ("hydra-engine chat --top", {"--top-p", "--top-k"}),
        ("hydra-engine env --b", {"--backend"}),
        ("hydra-engine completion z", {"zsh"}),
        ("hydra-engine demo --port", set()),
    ],
)
def test_bash_offers(line: str, offered: set[str], source: Path) -> None:
    assert completions(source, line) == offered


def test_bash_completes_what_is_typed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "some settings.yaml").write_text("")
    environment = {**os.environ, "PS1": "$ ", "HISTFILE": ""}
    with Terminal(["bash", "--norc", "--noprofile", "-i"], cwd=str(tmp_path), environment=environment) as bash:
        bash.type(f"source {source}; echo rea''dy\n")
        bash.until("ready\n")
        bash.type("echo hydra-engine; hydra-engine ser\t--max-num-s\t3 --dty\tbf\t--config some\t\x01echo \n")
        bash.until("echo hydra-engine")
        bash.until("serve --max-num-seqs 3 --dtype bfloat16 --config some\\ settings.yaml")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_flag_of_every_command_is_in_the_script(shell: str) -> None:
    text = script(shell)
    for name, parser in build_parser()[1].items():
        assert name in text
        for flag in parser.flags():
            assert (flag if shell != "fish" else f"-l {flag.removeprefix('--')} ") in text or _hidden(parser, flag)


def _hidden(parser: object, flag: str) -> bool:
    return any(flag in a.option_strings and a.help == "==SUPPRESS==" for a in parser._actions)  # type: ignore[attr-defined]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_shell_reads_its_script(shell: str) -> None:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"there is no {shell} here")
    done = subprocess.run([found, "-n"], input=script(shell), capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr

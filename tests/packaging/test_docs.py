"""Claims of the documents that can be checked: links, headings, flags, variables, routes, and the sentences of
errors."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGES
from tests.packaging.flags import FLAG, ROOT, VARIABLE, commands, of_scripts, variables
from tools import option_table

FOLDERS = (ROOT, ROOT / "docs", ROOT / "examples", ROOT / "kernels")
DOCUMENTS = sorted(path for folder in FOLDERS for path in folder.glob("*.md"))
# Flags of other programs that the documents name.
FOREIGN = {
    "CHANGELOG.md": {"enable-auto-tool-choice"},  # vLLM's, which changes nothing here
    "CONTRIBUTING.md": {"drawn"},  # pytest's, of tests/conftest.py
    # vLLM's and SGLang's: refused here, or taken because they change nothing
    "docs/cli.md": {"tensor-parallel-size", "enable-auto-tool-choice", "enable-metrics"},
    "docs/cluster.md": {
        "build-arg",
        "head",
        "address",
        "node-name",
        "labels",
        "num-cpus",
        "generate",
    },  # docker and Ray
    "docs/models.md": {"write", "index-url"},  # of the module that writes its table, and pip
    "docs/quickstart.md": {"extra-index-url"},  # pip
    "docs/gpu.md": {"rm", "gpus", "entrypoint"},  # docker
    # docker, pip, useradd, systemctl and curl
    "docs/operations.md": {
        "detach",
        "name",
        "restart",
        "init",
        "group-add",
        "read-only",
        "tmpfs",
        "cap-drop",
        "security-opt",
        "extra-index-url",
        "system",
        "home-dir",
        "shell",
        "now",
        "retry",
        "retry-delay",
        "retry-all-errors",
    },
    "docs/troubleshooting.md": {"cpuset-cpus"},  # docker
    "kernels/README.md": {"no-deps", "target"},  # pip
}


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    prose = re.sub(r"```.*?```", "", text_of(document), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", text_of(found), re.MULTILINE)
            assert anchor in map(slug, headings), target


@cache
def known_flags() -> frozenset[str]:
    return frozenset(set().union(*commands().values()) | of_scripts())


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_flag_and_variable_exists(document: Path) -> None:
    text = text_of(document)
    unknown = set(FLAG.findall(text)) - known_flags() - FOREIGN.get(name_of(document), set())
    assert not unknown
    assert not set(VARIABLE.findall(text)) - variables()


def test_nothing_reads_as_if_an_index_had_the_package() -> None:
    """A name that nobody has registered is one that anybody may take."""
    sources = [path for folder in (*PACKAGES, "bench", "examples") for path in (ROOT / folder).rglob("*.py")]
    sources += [*DOCUMENTS, *(path for path in (ROOT / "deploy").iterdir() if path.is_file())]
    assert not [
        name_of(path)
        for path in sources
        if re.search(r"hydra-engine\[|install '?hydra-engine\b(?! anew)", text_of(path))
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_command_exists(document: Path) -> None:
    known = commands()
    for line in re.findall(r"hydra-engine ((?:[a-z-]+)[^\n`|]*)", "\n".join(code_of(document))):
        command, *rest = line.split()
        assert command in known, line
        if command != "bench":
            assert {f.split("=")[0] for f in FLAG.findall(" ".join(rest))} <= known[command], line


def code_of(document: Path) -> list[str]:
    """Shell blocks and inline code, but no output and no prose."""
    text = text_of(document)
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`(hydra-engine [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [line for block in blocks for line in block.split("\n") if line.startswith("hydra-engine")] + inline


def test_the_index_names_every_document() -> None:
    folder = ROOT / "docs"
    index = text_of(folder / "README.md")
    assert not [path.name for path in folder.glob("*.md") if path.name != "README.md" and f"({path.name})" not in index]


def test_the_page_of_options_is_the_table() -> None:
    assert text_of(ROOT / "docs" / "options.md") == option_table.page(), "run python -m tools.option_table"


# ---- what the troubleshooting page quotes

HOLE = "\0"


@cache
def sentences() -> tuple[str, ...]:
    """Texts of the code, with a hole for each value."""
    found = []
    folders = (ROOT / "hydra_engine", ROOT / "hydra_transformers")
    for path in (ROOT / "setup.py", *(path for folder in folders for path in folder.rglob("*.py"))):
        for node in ast.walk(ast.parse(text_of(path))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(p.value) if isinstance(p, ast.Constant) else HOLE for p in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(?:\.\d)?[sdgf]", HOLE, node.value))
    return tuple(found)


def is_said(quoted: str) -> bool:
    parts = quoted.split("...")
    found = [sentence for sentence in sentences() if all(part in sentence for part in parts)]
    # Something must differ where the page has dots.
    pattern = re.compile(f".*{HOLE}.*".join(map(re.escape, parts)), re.DOTALL)
    return any(pattern.search(sentence) for sentence in found)


@pytest.mark.slow
def test_the_troubleshooting_page_quotes_what_the_code_says() -> None:
    quoted = []
    for section in text_of(ROOT / "docs" / "troubleshooting.md").split("\n## ")[1:]:
        rows = [re.split(r"(?<!\\) \| ", row.strip("| ")) for row in section.split("\n") if row.startswith("| ")]
        column = next((at for at, title in enumerate(rows[0]) if title in ("it says", "symptom")), None)
        assert column is not None, section[:40]
        for row in rows[2:]:
            quoted += re.findall(r"`([^`]+)`", row[column])
    said = [q for q in quoted if " " in q]
    assert len(said) > 40
    assert not [q for q in said if not is_said(q)]


@pytest.mark.slow
def test_what_is_not_said_is_not_found() -> None:
    assert is_said("cannot listen on ...: ...") and is_said("the model is still loading")
    assert not is_said("the model is ... loading") and not is_said("the engine is tired")


@pytest.mark.slow
def test_the_reference_defines_what_the_engine_names(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error::UserWarning", "-m", "tools.api_reference", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    for page, name in (
        ("frontend/call", "CallOptions.temperature"),
        ("frontend/call", "BatchOptions.progress"),
        ("frontend/handle", "Handle.result"),
        ("core/request", "Slo.tpot_s"),
        ("core/outputs", "Result.usage"),
        ("backend/base", "Ops.linear"),
    ):
        assert f'id="{name}"' in text_of(tmp_path / "hydra_engine" / f"{page}.html"), name

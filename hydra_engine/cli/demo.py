"""`hydra-engine demo`: the shipped model answers four questions concurrently, with a timeline below each answer."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from hydra_engine import log
from hydra_engine.cli.options import add_engine_options
from hydra_engine.cli.sources import read_settings
from hydra_engine.cli.summary import start_lines, timeline_lines
from hydra_engine.config import DEMO_MODEL

_FOLDER = Path(__file__).parents[1] / "demo"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    from hydra_engine.engine import Engine

    config = read_settings(arguments).engine(DEMO_MODEL, local_files=True)
    log.configure(config.log_level, log_format=config.log_format)
    questions = json.loads((_FOLDER / "questions.json").read_text(encoding="utf-8"))
    wrong = 0
    with Engine.from_config(config) as engine:
        _print("\n".join(start_lines(engine.summaries)))
        handles = [
            engine.submit(q["question"], _FOLDER / q["picture"] if q["picture"] else None, temperature=0, max_tokens=64)
            for q in questions
        ]
        for question, handle in zip(questions, handles, strict=True):
            _print(f"\npicture   {os.path.relpath(_FOLDER / question['picture']) if question['picture'] else '(none)'}")
            _print(f"question  {question['question']}")
            _print("answer    ", end="")
            for piece in handle:
                _print(piece.text, end="")
            result = handle.result()
            right = result.text.strip() == question["answer"]
            wrong += not right
            _print("" if right else f"\nexpected  {question['answer']}")
            _print("\n".join("  " + line for line in timeline_lines(result.timeline, result.metrics.slo)))
    _print(f"\n{len(questions) - wrong} of {len(questions)} answers are right.")
    return 1 if wrong else 0


def _print(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()

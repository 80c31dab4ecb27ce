"""The memory of a CPU lane in a long prefill of a mixture: within the memory plan, and most of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.miniatures import make_tiny

ROOT = Path(__file__).parents[2]
COMMON = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
COMMON |= {"num_hidden_layers": 2, "max_position_embeddings": 8192}
MIXTURE = {"moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 8}
SHARED = {"shared_expert_intermediate_size": 256, "num_hidden_layers": 4}
DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32}


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["auto", "int4"])
@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3_moe", COMMON | MIXTURE),
        ("qwen3_moe", COMMON | MIXTURE | {"num_attention_heads": 8, "hidden_size": 128, "moe_intermediate_size": 384}),
        ("qwen3_5_moe_text", COMMON | MIXTURE | DELTA | SHARED),
    ],
)
def test_a_long_prefill_stays_within_the_plan(
    family: str, text: dict[str, Any], quantization: str, tmp_path: Path
) -> None:
    make_tiny(family, tmp_path, seed=1, text=text)
    command = [sys.executable, "-m", "tests.worker.step_memory", str(tmp_path), quantization]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    peak, planned = json.loads(done.stdout)
    print(f"{family}, {quantization}: {peak >> 20} MiB of {planned >> 20}")
    assert 0.7 * planned < peak <= planned

"""Other model families over several instances: rotary positions, feature planes and tiles move with the blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.mixed import alone, mixture, together
from hydra_engine import Engine
from tests.engine.conftest import EngineFactory, assert_at_rest
from tests.engine.test_hybrid import HYBRID
from tests.engine.test_topologies import differences
from tools.miniatures import make_tiny

REQUESTS = mixture(10, tokens=8)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2_5_vl", {}),
        pytest.param("qwen3_vl", {"token_budget": 24}, marks=pytest.mark.slow),
        pytest.param("qwen3_5", {}, marks=pytest.mark.slow),
        pytest.param("qwen3_vl_moe", {"quantization": "int4"}, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("llava_next", {}, marks=pytest.mark.slow),
        pytest.param("internvl", {"dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
)
def test_families_give_the_tokens_of_one_instance(
    make_engine: EngineFactory, tmp_path: Path, family: str, options: dict[str, object]
) -> None:
    make_tiny(family, tmp_path, seed=3)
    common = {"threads": 1, "block_size": 4, "num_kv_blocks": 2048} | options
    with Engine(tmp_path, **common) as engine:
        golden = alone(engine, REQUESTS)
    engine = make_engine(model=tmp_path, topology="E+P+D", **common)
    for _ in range(2):
        assert differences(REQUESTS, together(engine, REQUESTS), golden) == []
    assert_at_rest(engine)


@pytest.mark.parametrize(
    ("topology", "options"),
    [
        ("E+P+D", {"token_budget": 24, "check_transfers": True}),
        pytest.param("EP+D", {"prefix_caching": False}, marks=pytest.mark.slow),
        pytest.param("ED+P", {"transport": "host"}, marks=pytest.mark.slow),
        pytest.param("E+PD", {}, marks=pytest.mark.slow),
        pytest.param("2E+P+2D", {"token_budget": 24, "num_kv_blocks": 300}, marks=pytest.mark.slow),
        pytest.param("E+P+D", {"kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param("2EPD", {}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_recurrent_states_move_with_their_keys_and_values(
    make_engine: EngineFactory, tmp_path: Path, topology: str, options: dict[str, Any]
) -> None:
    text = {**HYBRID, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    make_tiny("minicpmv4_6", tmp_path, seed=3, text_type="qwen3_5_text", text=text)
    quantized = {name: value for name, value in options.items() if name == "kv_cache_dtype"}
    with Engine(tmp_path, threads=1, block_size=4, num_kv_blocks=2048, **quantized) as engine:
        golden = alone(engine, REQUESTS)
    engine = make_engine(model=tmp_path, topology=topology, **({"num_kv_blocks": 2048} | options))
    for _ in range(2):
        assert differences(REQUESTS, together(engine, REQUESTS), golden) == []
    assert_at_rest(engine)

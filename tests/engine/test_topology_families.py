"""Other model families over several instances: rotary positions, feature planes and tiles move with the blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.mixed import alone, mixture, together
from hydra_engine import Engine
from hydra_engine.errors import ConfigError
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
        pytest.param("qwen3_5", {"topology": "E+PD"}, marks=pytest.mark.slow),
        pytest.param("qwen3_vl_moe", {"quantization": "int4"}, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", {"topology": "E+PD", "dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("llava_next", {}, marks=pytest.mark.slow),
        pytest.param("internvl", {"dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
)
def test_families_give_the_tokens_of_one_instance(
    make_engine: EngineFactory, tmp_path: Path, family: str, options: dict[str, object]
) -> None:
    make_tiny(family, tmp_path, seed=3)
    topology = options.get("topology", "E+P+D")
    common = {"threads": 1, "block_size": 4, "num_kv_blocks": 2048} | options
    common.pop("topology", None)
    with Engine(tmp_path, **common) as engine:
        golden = alone(engine, REQUESTS)
    engine = make_engine(model=tmp_path, topology=topology, **common)
    for _ in range(2):
        assert differences(REQUESTS, together(engine, REQUESTS), golden) == []
    assert_at_rest(engine)


@pytest.mark.slow
def test_recurrent_states_stay_where_they_are(make_engine: EngineFactory, tmp_path: Path) -> None:
    text = {**HYBRID, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    make_tiny("minicpmv4_6", tmp_path, seed=3, text_type="qwen3_5_text", text=text)
    with pytest.raises(ConfigError, match=r"E\+2PD"):
        make_engine(model=tmp_path, topology="E+P+D")
    with Engine(tmp_path, threads=1) as engine:
        golden = alone(engine, REQUESTS)
    engine = make_engine(model=tmp_path, topology="E+PD", num_kv_blocks=2048)
    assert differences(REQUESTS, together(engine, REQUESTS), golden) == []

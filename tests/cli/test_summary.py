"""The start-up summary, of one instance and of several, and the line below an answer about limits."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from hydra_engine import __version__
from hydra_engine.cli.summary import limit_lines, seconds, start_lines, timeline_lines
from hydra_engine.core.outputs import SloReport, StageSpan
from hydra_engine.core.reports import InstanceSummary, LimitBudget, LimitSummary

BUDGETS = (LimitBudget(1, 0.0123, 480, math.inf), LimitBudget(8, 0.0174, 320, 0.0312), LimitBudget(64, 0.0391, 0, 0.0))


def test_no_limits_no_lines() -> None:
    assert limit_lines(LimitSummary()) == []


def test_limits_budgets_and_where_they_come_from() -> None:
    limits = LimitSummary(0.04, 1.0, "measured just now in 9.1 s", BUDGETS)
    assert limit_lines(limits) == [
        "  latency      40 ms between tokens, 1 s to the first token; costs: measured just now in 9.1 s",
        "  budgets      beside 1 decode (12.3 ms alone): 480 prefill tokens, or vision for the whole step",
        "               beside 8 decodes (17.4 ms alone): 320 prefill tokens, or 31.2 ms of vision",
        "               beside 64 decodes (39.1 ms alone): 0 prefill tokens, or 0 ms of vision",
    ]


def test_a_model_without_vision_has_no_vision() -> None:
    lines = limit_lines(LimitSummary(tpot_limit_s=0.04, budgets=(LimitBudget(1, 0.01, 64),)))
    assert lines[-1].endswith("64 prefill tokens")


def test_a_limit_out_of_reach_is_said() -> None:
    limits = LimitSummary(0.01, warnings=("tpot_slo 10 ms cannot be kept here: one request alone takes 12.3 ms",))
    assert limit_lines(limits) == [
        "  latency      10 ms between tokens",
        "  note         tpot_slo 10 ms cannot be kept here: one request alone takes 12.3 ms",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0005, "0.5 ms"), (0.04, "40 ms"), (0.9994, "999 ms"), (0.9996, "0.9996 s"), (1, "1 s"), (3599, "3599 s")],
)
def test_durations_as_people_write_them(value: float, text: str) -> None:
    assert seconds(value) == text


SPANS = (StageSpan("prefill", 0.0, 0.1), StageSpan("decode", 0.1, 0.5))


def test_the_verdict_is_the_last_line() -> None:
    slo = SloReport(1.0, 0.04, True, False, 7, 23, "encode of request 5")
    lines = timeline_lines(SPANS, slo)
    assert [line.split()[0] for line in lines[:-1]] == ["prefill_wait", "prefill", "decode"]
    assert lines[-1] == (
        "limits       first token within 1 s: met · 90 % of gaps within 40 ms: missed (7 of 23 late) · "
        "encode of request 5"
    )


def test_verdicts_name_only_the_limits_there_were() -> None:
    assert not any(line.startswith("limits") for line in timeline_lines(SPANS, SloReport()))
    (line,) = timeline_lines((), SloReport(tpot_limit_s=0.04))
    assert line == "limits       90 % of gaps within 40 ms: not known"


# ---- several instances

GIB = 1 << 30


def instance(name: str, role: str, **changes: Any) -> InstanceSummary:
    """The summary of an instance with a decoder of 13 GiB, a tower of 1 GiB, and the caches that the role needs."""
    vision = GIB if "E" in role else 0
    language = 13 * GIB if set(role) & {"P", "D"} else 0
    kv_blocks = 512 if language else 0
    image_blocks = 8 if set(role) & {"E", "P"} else 0
    fields: dict[str, Any] = {
        "model": "m",
        "family": "llava",
        "device": "cpu",
        "dtype": "bfloat16",
        "backend": "native-amx",
        "deterministic": True,
        "threads": 2,
        "weights_bytes": vision + language,
        "vision_weights_bytes": vision,
        "language_weights_bytes": language,
        "kv_cache_bytes": kv_blocks * (1 << 20),
        "image_cache_bytes": image_blocks * (1 << 20),
        "num_kv_blocks": kv_blocks,
        "num_image_blocks": image_blocks,
        "kv_block_size": 16,
        "image_block_size": 64,
        "max_model_len": 4096,
        "token_budget": 512,
        "image_budget": 1152,
        "load_s": 1.0,
    }
    return InstanceSummary(name=name, role=role, **(fields | changes))


def test_a_topology_is_a_table_with_what_each_does_without() -> None:
    summaries = [instance("e0", "E", max_model_len=99), instance("p0", "P", load_s=3.0), instance("d0", "D")]
    lines = start_lines(summaries)
    assert lines[:3] == [
        f"hydra-engine {__version__}",
        "  model        m (llava), 7.5 billion parameters, bfloat16",
        "  topology     E+P+D: 3 instances, 2 threads per lane, ops native-amx, deterministic",
    ]
    kv, images = "512 MiB (8192 tokens)", "8 MiB"
    assert [re.split("  +", line.strip()) for line in lines[3:7]] == [
        ["instance", "role", "device", "weights", "KV cache", "image cache"],
        ["e0", "E", "cpu", "1 GiB (no decoder: -13 GiB)", "none", images],
        ["p0", "P", "cpu", "13 GiB (no tower: -1 GiB)", kv, images],
        ["d0", "D", "cpu", "13 GiB (no tower: -1 GiB)", kv, "none"],
    ]
    narrow = instance("i0", "EPD", dtype="float32", weights_dtype="bfloat16")
    assert start_lines([narrow])[1].endswith("7.5 billion parameters, weights bfloat16, activations float32")
    assert max(map(len, lines)) <= 100
    assert len({line.index(start) for line, start in zip(lines[3:7], ("KV", "none", kv, kv), strict=True)}) == 1
    assert lines[7:] == [
        "  limits       4096 tokens a request, 512 tokens a language step, 1152 patches a vision step",
        "  loaded in    3.0 s",
    ]


def test_a_text_model_lacks_no_tower() -> None:
    text = "\n".join(start_lines([instance("p0", "P"), instance("d0", "D")]))
    assert "P+D: 2 instances" in text and ": -" not in text and "vision tower" not in text


def test_what_all_say_is_said_once_and_the_rest_with_names() -> None:
    limits = LimitSummary(0.04, budgets=BUDGETS[:1])
    late = LimitSummary(0.04, warnings=("tpot_slo 40 ms cannot be kept here",))
    lines = start_lines(
        [
            instance("ep0", "EP", notes=("dtype bfloat16", "KV cache: small"), limits=late),
            instance("pd0", "PD", notes=("dtype bfloat16", ""), limits=limits),
            instance("pd1", "PD", notes=("dtype bfloat16", "KV cache: small"), ops=(("rope", "reference", "slow"),)),
        ]
    )
    assert lines[2].startswith("  topology     EP+2PD: 3 instances")
    assert [line for line in lines if line.startswith(("  latency", "  budgets"))] == [
        "  latency      40 ms between tokens",
        "  budgets      beside 1 decode (12.3 ms alone): 480 prefill tokens, or vision for the whole step",
    ]
    assert lines[-4:] == [
        "  in torch     rope",
        "  note         ep0: tpot_slo 40 ms cannot be kept here",
        "  note         dtype bfloat16",
        "  note         ep0, pd1: KV cache: small",
    ]


def test_one_instance_is_told_as_ever() -> None:
    one = instance("epd0", "EPD", notes=("dtype bfloat16",))
    assert start_lines([one])[2:4] == [
        "  instance     epd0, role EPD, cpu, 2 threads per lane, ops native-amx, deterministic",
        "  memory       weights 14 GiB, KV cache 512 MiB (8192 tokens), image cache 8 MiB (512 rows)",
    ]


def test_on_a_gpu_it_says_what_steps_take() -> None:
    gpu = {"device": "cuda:0", "activation_bytes": 3 * GIB, "free_bytes": 9 * GIB, "device_bytes": 80 * GIB}
    one = instance("pd0", "PD", num_graphs=54, graph_bytes=GIB // 2, captured_tokens=2048, **gpu)
    lines = start_lines([one])
    assert lines[4] == "  steps        activations 3 GiB, 9 GiB of 80 GiB free"
    assert (
        lines[5] == "  graphs       54, 512 MiB for captured decode steps and steps with prompts of up to 2048 tokens"
    )
    whole = instance("epd0", "EPD", num_graphs=70, graph_bytes=GIB, captured_patches=4096, **gpu)
    assert "  graphs       70, 1 GiB for captured decode steps and encodes of up to 4096 patches" in start_lines(
        [whole]
    )
    encoding = instance("e0", "E", num_graphs=7, graph_bytes=GIB // 4, captured_patches=640, **gpu)
    assert "  graphs       7, 256 MiB for captured encodes of up to 640 patches" in start_lines([encoding])
    lines = start_lines([instance("e0", "E", **gpu), one])
    assert lines[6:8] == [
        "  steps        e0: activations 3 GiB, 9 GiB of 80 GiB free",
        "               pd0: activations 3 GiB, 9 GiB of 80 GiB free",
    ]


def test_limits_of_single_instances_have_a_line_each() -> None:
    alike = [instance("e0", "E"), instance("p0", "P"), instance("d0", "D")]
    assert not [line for line in start_lines(alike) if line.startswith("    of ")]
    own = [instance("e0", "E"), instance("p0", "P", max_num_seqs=16), instance("d0", "D", token_budget=64)]
    lines = [line for line in start_lines(own) if line.startswith("    of ")]
    assert lines == [
        "    of p0       512 tokens a language step, 16 requests at once",
        f"    of d0       64 tokens a language step, {own[2].max_num_seqs} requests at once",
    ]

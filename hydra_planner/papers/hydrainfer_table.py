"""HydraInfer's experiments and its own numbers, as data."""

from __future__ import annotations

from hydra_planner.papers import hydrainfer as alone
from hydra_planner.papers import hydrainfer_serving as serving
from hydra_planner.papers.measured import ALONE, TOGETHER
from hydra_planner.papers.results import Experiment, Table, closed_form
from hydra_planner.workload.shapes import TABLE_3

_PAPER = alone.PAPER
_LLAVA_LOAD = "LLaVA-1.5-7B, TextCaps"
_NEXT_LOAD = "LLaVA-NeXT-7B, TextCaps"

EXPERIMENTS = (
    Experiment(
        "hydrainfer-t1",
        _PAPER,
        "Symbols",
        "closed form",
        "Sizes of LLaVA-1.5-7B.",
        closed_form(alone.notations),
    ),
    Experiment(
        "hydrainfer-t2",
        _PAPER,
        "Arithmetic intensity of the operations",
        "closed form",
        "The paper's formulas with the sizes of LLaVA-1.5-7B: one picture of 576 tokens, prompts and contexts of 1024.",
        closed_form(alone.operations),
        remark="The FLOP of a decode's projections are printed as 8BH and are 8BH squared, as for one row of a "
        "prefill; the "
        "values that a decode's attention reads are printed with M and S, where they are 2BSH.",
    ),
    Experiment(
        "hydrainfer-t3",
        _PAPER,
        "Limits, and what a request needs alone",
        "closed form",
        "90th percentile over a load, on an idle H800 by its roofline.",
        closed_form(alone.limits),
        Table(
            ("model", "data set", "TTFT s", "TPOT s"),
            tuple((model, load, *pair) for model, by_load in TABLE_3.items() for load, pair in by_load.items()),
            2,
        ),
        remark="A limit of 8 s for the first token stands beside one of 0.25 s for the same model and pictures of the "
        "same "
        "576 tokens.",
    ),
    Experiment(
        "hydrainfer-f4",
        _PAPER,
        "Encodes and decodes on one device, in turn and side by side",
        "closed form",
        "LLaVA-1.5-7B on an H800; the gain is that of one H200, where it was measured with contexts of 1024 "
        "(`hydra_planner/hardware/corun.json`).",
        closed_form(alone.side_by_side),
        measured=TOGETHER,
        command="hydra-engine bench colocate --model llava-1.5-7b --full",
    ),
    Experiment(
        "hydrainfer-f5",
        _PAPER,
        "Arithmetic intensity over tokens, with pictures in the same step",
        "closed form",
        "Products of decoder and tower of LLaVA-1.5-7B by the formulas of Table 2.",
        closed_form(alone.intensities),
        remark="The caption names LLaMA1.5-7B for LLaVA-1.5-7B.",
    ),
    Experiment(
        "hydrainfer-f6",
        _PAPER,
        "Throughput of each stage over its batch",
        "closed form",
        "LLaVA-1.5-7B on one H800 by its roofline, prompts and contexts of 1024. On an H200 some were measured.",
        closed_form(alone.batches),
        measured=ALONE,
        command="hydra-engine bench encode --model llava-1.5-7b --full",
        remark="A decode of 512 contexts of 1024 tokens has 256 GiB of KV in LLaVA-1.5-7B, which one H800 cannot hold.",
    ),
    Experiment(
        "hydrainfer-f7",
        _PAPER,
        "Stalls between tokens by schedule",
        "simulated",
        f"{_NEXT_LOAD}, one EPD instance at 8 requests a second. Other engines are this one with their order of work: "
        "prompts before decodes as vLLM had it, one lane for both models, and batches that run to completion.",
        serving.stalls,
        command="python -m bench.serve tail --model llava-1.5-7b --server-args='--load-format random' "
        "--baseline request-level",
    ),
    Experiment(
        "hydrainfer-f8",
        _PAPER,
        "The system",
        "on this machine",
        "A drawing without numbers; ours is docs/architecture.md and docs/topologies.md.",
    ),
    Experiment(
        "hydrainfer-f9",
        _PAPER,
        "Work of the data sets",
        "closed form",
        "LLaVA-NeXT-7B on an H800 by its roofline; loads of this engine that stand for the data sets (the paper "
        "prints a "
        "picture without figures).",
        closed_form(alone.workload),
    ),
    Experiment(
        "hydrainfer-f10",
        _PAPER,
        "Goodput beside other engines",
        "simulated",
        "LLaVA-NeXT-7B on one H800, limits of 0.5 s and 20 ms. Other engines are this one with their order of work, so "
        "the differences are of schedules and not of kernels. By the paper's measure a request may wait too long for a "
        "tenth of its tokens, which is kind to schedules that stall all decodes seldom and long; hydrainfer-f7 has the "
        "longest gaps. On processors one comparison with engines was made "
        "(docs/benchmarks-serving.md); the command makes it on a GPU.",
        serving.engines,
        command="python -m bench.serve curve --model llava-1.5-7b --server-args='--load-format random' --peer vllm=URL",
        remark="The abstract and the introduction have up to four times vLLM's rate, section 5.2 also two to three "
        "times "
        "SGLang's for Qwen2-VL alone.",
    ),
    Experiment(
        "hydrainfer-f11",
        _PAPER,
        "Ratios of three methods",
        "simulated",
        f"{_LLAVA_LOAD}, eight H800, 8 requests a second for each as in the paper, and 20, where queues form on a "
        f"roofline "
        "too. Medians.",
        serving.ratios,
    ),
    Experiment(
        "hydrainfer-f12",
        _PAPER,
        "The best method for each pair of limits",
        "simulated",
        "LLaVA-NeXT-7B, TextVQA, three H800; every deployment gets the limits. A cell names all methods that keep "
        "the highest of nine rates, in requests a second for each device, found by bisection; = is a tie.",
        serving.methods,
        before="with deployments that were not told the limits and loads of 60 requests, EPD was best in tight limits "
        "and EP+D and ED+P in all others.",
    ),
    Experiment(
        "hydrainfer-f13",
        _PAPER,
        "Where the time of a request goes",
        "simulated",
        f"{_LLAVA_LOAD}, 1E3P4D on eight H800 at 8 requests a second for each.",
        serving.breakdown,
    ),
    Experiment(
        "hydrainfer-f14",
        _PAPER,
        "What each half of the design gives",
        "simulated",
        f"{_NEXT_LOAD}, five H800 with limits of 0.5 s and 10 ms. Without budgets is not without stages: the "
        "last rows have other schedules on the same devices; hydrainfer-f10 says what the measure forgives.",
        serving.halves,
        Table(
            ("part", "goodput of 8 devices"),
            (("disaggregated", 9.5), ("EPD alone", 7.2), ("prefill first", 5.1)),
        ),
        before="with loads of 60 requests the rates were 29 to 43 % higher, in the same order.",
        remark="Rates are 5 to 10 requests a second of eight devices, about one for each, where Figure 11 runs at 8.",
    ),
)

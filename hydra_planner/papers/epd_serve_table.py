"""EPD-Serve's experiments and its own numbers, as data."""

from __future__ import annotations

from collections.abc import Callable

from hydra_planner.papers import epd_serve as ours
from hydra_planner.papers.results import Experiment, Result, Scale, Table, closed_form

_MODEL = "Qwen2.5-VL-7B in place of openPangu-7B-VL, Ascend 910B by their roofline"
_RATES = (
    f"{_MODEL}; rates for each device, beyond the paper's 12, and the stricter limits of section 4.4 (0.8 s, 30 ms), "
    "because a roofline queues later and keeps the others."
)
_TP2 = " TP2 is missing: the engine has no tensor parallelism."

_TABLE_5 = Table(
    ("deployment", "NPUs", "TTFT ms", "TPOT ms", "attainment %", "tokens/s per NPU"),
    (
        ("TP1x2", 2, 658.27, 95.56, 2.15, 13.38),
        ("(E-PD)x2", 2, 548.32, 62.22, 3.13, 19.7),
        ("EP-D", 2, 5523.82, 27.31, 8.2, 21.54),
        ("(E-P)-D", 2, 2386.85, 28.4, 26.17, 77.36),
        ("(E-D)-P", 2, 651.86, 50.71, 22.66, 69.18),
        ("E-P-D", 3, 557.89, 28.92, 94.34, 192.7),
    ),
)


def _figure(name: str, title: str, run: Callable[[Scale], Result], setting: str, remark: str = "") -> Experiment:
    return Experiment(f"epd-serve-{name}", ours.PAPER, title, "simulated", setting + _TP2, run, remark=remark)


EXPERIMENTS = (
    Experiment(
        "epd-serve-t1",
        ours.PAPER,
        "Parameters of tower and decoder",
        "closed form",
        "By the published sizes; Qwen3-VL-8B is left out.",
        closed_form(ours.parameters),
        Table(
            ("model", "tower G", "decoder G"),
            (("openPangu-7B-VL", 0.7, 7), ("Qwen3-VL-8B", 0.6, 8), ("InternVL3-78B", 6, 72)),
        ),
    ),
    Experiment(
        "epd-serve-t2",
        ours.PAPER,
        "Features and KV that are moved early",
        "simulated",
        f"{_MODEL}; ShareGPT-4o, E-P-D, 2 and 3 requests a second for each device.",
        ours.early,
        Table(
            ("method", "TTFT ms at 2", "TPOT ms at 2", "TTFT ms at 3", "TPOT ms at 3"),
            (
                ("neither", 703.75, 39.29, 880.22, 42.39),
                ("features", 586.87, 38.36, 688.86, 41.5),
                ("KV", 590.8, 39.42, 775.83, 43.89),
                ("EPD-Serve", 481.38, 38.2, 650.51, 43.95),
            ),
        ),
    ),
    Experiment(
        "epd-serve-t3",
        ours.PAPER,
        "Moving features of one picture",
        "closed form",
        f"{_MODEL}; a copy over HCCS at what is reached of its rate, against the encode before it.",
        closed_form(ours.transmissions),
        Table(
            ("picture", "features", "moved ms", "scheduling ms", "overlap %"),
            (
                ("280x280", 100, 8.145, 30.803, 100),
                ("560x560", 400, 15.819, 42.406, 100),
                ("640x960", 529, 17.019, 49.549, 100),
                ("720x1280", 1196, 38.776, 81.028, 100),
                ("1080x1920", 2691, 80.771, 151.77, 100),
                ("4096x3112", 16206, 729.724, 728.109, 99.78),
            ),
        ),
        remark="529 features are those of 640x640; 640x960 has 782. 111 MiB in 730 ms are 0.16 GB/s, a fiftieth of "
        "what "
        "Table 4 has for KV.",
    ),
    Experiment(
        "epd-serve-t4",
        ours.PAPER,
        "Moving the KV of a batch of 16 prompts",
        "closed form",
        f"{_MODEL}; KV moves by steps of a prefill and not by layers: what a step has made moves while the next one "
        f"runs.",
        closed_form(ours.kv_transmissions),
        Table(
            ("prompt", "KV ms", "exposed ms", "prefill ms", "overlap %", "GB/s"),
            ((1024, 715.53, 8.76, 6610.57, 98.78, 12.58), (2048, 1536.49, 1.16, 14261.21, 99.92, 11.71)),
        ),
        remark="9 GB for 16 prompts of 1024 tokens are 0.55 MB for a token, ten times the KV of a decoder with shared "
        "heads; "
        "the prefill runs at about a tenth of the device's peak.",
    ),
    Experiment(
        "epd-serve-t5",
        ours.PAPER,
        "Six deployments at a high rate",
        "simulated",
        f"{_MODEL}; ShareGPT-4o, limits of 2 s and 50 ms, 10 requests a second as in the paper, and 25.",
        ours.high_load,
        _TABLE_5,
        before="with loads of 60 requests all deployments kept 100 % of the requests within the limits at 25 a second, "
        "and (E-PD)x2 was the best.",
        remark="192.70 is 8.95 times 21.54, not 7.95 times; three devices are compared with two at the same rate.",
    ),
    Experiment(
        "epd-serve-4.4",
        ours.PAPER,
        "Decode apart under stricter limits",
        "simulated",
        f"{_MODEL}; ShareGPT-4o, 0.8 s and 30 ms, the paper's 4 requests a second for each device, and 8 and 12.",
        ours.strict,
        Table(
            ("rate per device", "deployment", "attainment %", "tokens/s"),
            ((4.0, "EP-D", 59.57, 294.68), (4.0, "(E-P)-D", 84.96, 420.16)),
            2,
        ),
    ),
    Experiment(
        "epd-serve-f2",
        ours.PAPER,
        "Shares of the stages over the size of a picture",
        "closed form",
        f"{_MODEL}; a request alone with 64 tokens of output, decodes in batches of 64.",
        closed_form(ours.encode_share),
    ),
    Experiment(
        "epd-serve-f6",
        ours.PAPER,
        "What steps do to each other on one device",
        "closed form",
        f"{_MODEL}; whole steps and not operators, by what each needs of arithmetic and memory. On a GPU the command "
        "measures it.",
        closed_form(ours.sharing),
        command="hydra-engine bench colocate --full",
    ),
    Experiment(
        "epd-serve-f7",
        ours.PAPER,
        "Overlap of KV transmission and prefill",
        "closed form",
        "As epd-serve-t4; profiles of a device are not to be had here.",
        closed_form(ours.kv_transmissions),
        Table(("prompt", "overlap %", "overlap % by layers"), ((1024, 98.78, 15.27), (2048, 99.92, 25.08))),
    ),
    _figure("f8", "Encode apart: requests within the limits", ours.encode_attainment, _RATES),
    _figure(
        "f9",
        "Encode apart: throughput",
        ours.encode_throughput,
        _RATES,
        "A device for encodes is said to do harm because encodes are light, where section 1 has encodes dominate the "
        "latency.",
    ),
    _figure(
        "f10",
        "Encode apart: time to the first token",
        ours.encode_ttft,
        _RATES,
        "2.7 to 3.25 % less are called a significant reduction.",
    ),
    _figure("f11", "Encode apart: time between tokens", ours.encode_tpot, _RATES),
    _figure("f12", "Decode apart: requests within the limits", ours.decode_attainment, _RATES),
    _figure(
        "f13",
        "Decode apart: throughput",
        ours.decode_throughput,
        _RATES,
        "The abstract's 57 to 69 % are of effective throughput, tokens of requests within the limits.",
    ),
    _figure("f14", "Decode apart: time to the first token", ours.decode_ttft, _RATES),
    _figure("f15", "Decode apart: time between tokens", ours.decode_tpot, _RATES),
    _figure(
        "f16",
        "Distribution of times over deployments",
        ours.distributions,
        f"{_MODEL}; ShareGPT-4o, quantiles in place of dots.",
        "EP-D is said to keep its first tokens early at 12 requests a second for each device; Table 5 has 5.5 s at 5.",
    ),
    _figure(
        "f17",
        "Ranks of deployments over rates",
        ours.ranks,
        f"{_MODEL}; ShareGPT-4o, 1 is the best; throughput is that of a device.",
    ),
)

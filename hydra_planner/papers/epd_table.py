"""EPD's experiments and its own numbers, as data."""

from __future__ import annotations

from hydra_planner.papers import epd
from hydra_planner.papers.results import Cell, Experiment, Table, closed_form

_MINI, _EIGHT, _LARGE = epd.MODELS


def _by_size(values: dict[str, tuple[tuple[Cell, ...], ...]]) -> tuple[tuple[Cell, ...], ...]:
    return tuple((name, size, *row) for name, rows in values.items() for size, row in zip(epd.SIZES, rows, strict=True))


_IMAGES = _by_size(
    {_MINI: ((77, 490), (26, 165), (7, 49)), _EIGHT: ((19, 19),) * 3, _LARGE: ((1, 10), (11, 45), (1, 10))}
)
_BATCH = _by_size(
    {
        _MINI: ((1, 7, 49, 86), (3, 2, 16, 29), (10, "memory", 4, 9)),
        _EIGHT: ((13, 2, 15, 2), (3, 9, 67, 10), (13, 2, 15, 2)),
        _LARGE: ((13, "memory", 6, 1), (3, 1, 22, 4), (13, "memory", 6, 1)),
    }
)
_SHARES: dict[str, dict[int, tuple[Cell, Cell]]] = {
    _MINI: {5: (86, 99), 10: (74, 97), 20: (49, 95), 40: ("memory", 92), 80: ("memory", "context")},
    _EIGHT: {5: (94, 95), 10: (89, 91), 20: ("context", "context")},
    _LARGE: {5: (67, 89), 10: (36, 80), 20: ("memory", 63), 40: ("memory", "context")},
}
_SERVED = "pictures of 4032x3024 (0.15 s of a core for the pixels of each), 22 tokens of text, 10 of output"
_MEMORY = "One A100 of 80 GB by the formulas of `hydra-engine memory`; EP stands for DistServe's and vLLM's prefill."

EXPERIMENTS = (
    Experiment(
        "epd-t1",
        epd.PAPER,
        "Limits, and what a request needs alone",
        "closed form",
        f"Roofline of one A100; {_SERVED}.",
        closed_form(epd.limits),
        Table(
            ("model", "pictures", "TTFT s", "TPOT s"),
            tuple((n, count, *pair) for n, by_count in epd.LIMITS.items() for count, pair in by_count.items()),
            2,
        ),
        remark="0.95 s between tokens for six pictures of InternVL2-26B stand between 0.08 and 0.15 s for four and "
        "eight.",
    ),
    Experiment(
        "epd-t2",
        epd.PAPER,
        "Most pictures of one request",
        "closed form",
        _MEMORY,
        closed_form(epd.max_pictures),
        Table(("model", "picture", "DistServe", "EPD"), _IMAGES, 2),
        remark="19 pictures of 787x444 are 15,000 tokens of InternVL2-8B, so the same context cannot bind at all "
        "sizes as "
        "the text says.",
    ),
    Experiment(
        "epd-t3",
        epd.PAPER,
        "Largest batches, ten pictures a request",
        "closed form",
        f"{_MEMORY} A batch is as many requests as the caches hold.",
        closed_form(epd.batches),
        Table(("model", "picture", "patches", "E, P together", "E", "P"), _BATCH, 2),
    ),
    Experiment(
        "epd-t4",
        epd.PAPER,
        "KV cache of a prefill instance",
        "closed form",
        f"{_MEMORY} Shares of what the weights leave; an image cache for as many pictures as a request may have.",
        closed_form(epd.kv_sizes),
        Table(
            ("model", "pictures", "DistServe %", "EPD %"),
            tuple((name, count, *pair) for name, by_count in _SHARES.items() for count, pair in by_count.items()),
            2,
        ),
        remark="20 pictures are beyond the context of InternVL2-8B and within that of InternVL2-26B, though both make "
        "as many "
        "tokens of them and have the same context.",
    ),
    Experiment(
        "epd-5.3",
        epd.PAPER,
        "Memory that apart stages save",
        "closed form",
        "Weights in 16 bits, by the published sizes; the E and the P instance beside one that does both.",
        closed_form(epd.savings),
        Table(
            ("model", "E saves %", "P saves %"),
            ((_MINI, 95, 5), (_EIGHT, 96.2, 3.7), (_LARGE, 78.3, 21.6)),
        ),
    ),
    Experiment(
        "epd-f4",
        epd.PAPER,
        "Requests within both limits over the rate",
        "simulated",
        f"Eight A100: 5E2P1D, 7EP1D, 8EPD; {_SERVED}; limits of Table 1. DistServe and vLLM are this engine in their "
        "topologies, and in two more columns with their order of work too: encodes and steps of the decoder in turns, "
        "and whole prompts before decodes.",
        epd.attainment,
        remark="The caption says that EPD-IRP is EPD without parallel encodes, the text that EPD-IRP parallelizes and "
        "is the "
        "best; 16 pictures are spoken of where the rows end at 8.",
    ),
    Experiment(
        "epd-f5",
        epd.PAPER,
        "Time to the first token over pictures",
        "simulated",
        f"{_SERVED}; 0.25 and 0.08 requests a second. EPD: 5E2P1D; not parallel: the same, with all pictures of a "
        "request encoded by one encoder; DistServe: 7EP1D, also with encodes and steps of the decoder in turns.",
        epd.first_tokens,
        Table(
            ("model", "pictures", "less than DistServe %"),
            ((_MINI, "any", 71.9), (_EIGHT, "any", 32.8), (_LARGE, "any", 44.9)),
            2,
        ),
        remark="As in Figure 4 caption and text disagree on which name is EPD without parallel encodes.",
    ),
    Experiment(
        "epd-f6",
        epd.PAPER,
        "Offline throughput: ratio, pictures, batches",
        "simulated",
        f"MiniCPM-V 2.6 on eight A100, all requests at once; {_SERVED}; batches by the image budget of a step.",
        epd.offline,
        Table(("part", "deployment", "best"), (("ratio", "5E2P1D", "yes"),), 2),
        remark="The middle plot is said to show a gain at few pictures because encoders do not become a bottleneck, "
        "which "
        "would hold at many pictures too.",
    ),
)

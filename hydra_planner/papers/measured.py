"""Numbers of the papers' experiments that were measured on a GPU: rows of documents in bench/results, with which a test
compares them."""

from __future__ import annotations

from hydra_planner.papers.results import Table

# Both without end, on two streams (rows "beside"): gain over turns, and the slowdown of either.
TOGETHER = (
    "h200*/colocate-llava-1.5-7b.json",
    Table(
        ("beside decodes", "decodes", "gain", "at most", "decodes slower", "the other slower"),
        (
            ("2 pictures", 8, 1.035, 1.026, 1.03, 15.2),
            ("2 pictures", 64, 1.1, 1.104, 1.182, 3.886),
            ("8 pictures", 64, 1.056, 1.285, 1.371, 2.991),
            ("prompt of 1024", 64, 1.083, 1.575, 1.775, 1.938),
        ),
        2,
    ),
)
# As graphs; pictures, prompts and tokens a second.
ALONE = (
    "h200",
    Table(
        ("batch", "encodes/s", "prefills/s", "decodes/s"),
        ((1, 594.8, 43.56, 236.9), (4, 1103.0, None, None), (8, None, None, 1561.0), (64, None, None, 5119.0)),
    ),
)
GRAPHS = (
    "h200",
    Table(
        ("step", "as a graph ms", "launched one by one ms", "times as fast"),
        (
            ("decode of 1", 4.221, 9.796, 2.321),
            ("decode of 8", 5.124, 11.91, 2.325),
            ("decode of 64", 12.5, 14.64, 1.171),
            ("decode of 128", 20.51, 21.85, 1.066),
            ("1 picture", 1.681, 4.774, 2.839),
            ("4 pictures", 3.627, 5.02, 1.384),
        ),
    ),
)

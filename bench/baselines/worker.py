"""A vision lane that never pauses: budgets hear that it cannot, so its allowance beside a language step has no end."""

from __future__ import annotations

from hydra_engine.worker.worker import Worker


class UnslicedWorker(Worker):
    PIECE_ROWS = 0
    num_slices = 0

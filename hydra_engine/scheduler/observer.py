"""What the scheduler tells about its steps, to whoever explains late tokens, and what it asks of it.

The observer of a scheduler that was given none: it keeps nothing. The one that knows whose prefill, encode or move a
token waited for is `latency/attribution.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hydra_engine.core.cost import LanguageLoad
from hydra_engine.core.ids import RequestId
from hydra_engine.core.outputs import DelayCause

Work = Sequence[tuple[RequestId, int]]  # (request, tokens or patches), amounts positive


class StepObserver:
    """Steps of a lane are told in order."""

    def on_vision_planned(self, now: float, items: Work) -> None:
        """A vision step is given to the lane, which begins it as soon as the ones before it have ended."""

    def on_vision_done(self, started_s: float, ended_s: float, items: Work) -> None:
        """The oldest vision step that has begun has ended."""

    def on_language_done(
        self, started_s: float, ended_s: float, load: LanguageLoad, chunks: Work, vision_s: float
    ) -> None:
        """A language step has ended, beside which vision ran for `vision_s`. The hot path."""

    def on_away(self, request_id: RequestId, kind: str, now: float, until_s: float = math.inf) -> None:
        """The request is computed by no step here until then, or until one of its own; `kind` is the cause of that."""

    def explain(self, request_id: RequestId, since_s: float, until_s: float, limit_s: float) -> tuple[DelayCause, ...]:
        """What the time between a request's token at `since_s` and its next one at `until_s`, longer than `limit_s`,
        went to: at least one cause, the largest first."""
        return (DelayCause("step", until_s - since_s),)

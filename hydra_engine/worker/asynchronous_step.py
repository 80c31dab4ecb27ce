"""One step of the language lane on a device that works behind the call: tokens are sampled there, and the next step
takes them from there, so that it can be launched before they have been read.

Rows that need more than filters and a draw are sampled on the host all the same: their step waits for its logits, and
so for everything before it. A step of decodes alone replays a graph where there is one. Does not know lanes, nor what
becomes of rows that fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import Draws
from hydra_engine.core.plans import DecodeRows, Ints, LanguagePlan
from hydra_engine.models.inputs import LanguageInput
from hydra_engine.worker.batches import StepRows
from hydra_engine.worker.decode_graphs import DecodeGraphs
from hydra_engine.worker.device_seats import DeviceSeats
from hydra_engine.worker.faults import MID_LANGUAGE_STEP
from hydra_engine.worker.language_step import Begun, StepForm, StepParts, Unread, sampled
from hydra_engine.worker.parts import Samples
from hydra_engine.worker.ports import WorkerRequest
from hydra_engine.worker.sampler import Logits
from hydra_engine.worker.seats import Asked


class AsynchronousStep(StepForm):
    """Plain rows are sampled on the device. What it writes to the seats comes last, so that a step that raised can be
    run again; a replay writes them itself, and does not raise."""

    _seats: DeviceSeats

    def __init__(self, parts: StepParts, seats: DeviceSeats, graphs: DecodeGraphs | None = None) -> None:
        super().__init__(parts, seats)
        self._graphs = graphs

    def run(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> Samples | Unread:
        begun = self._begin(plan, records)
        rows = self._rows(plan, records)
        outcome: Samples | Unread
        if self._graphs is not None and self._can_replay(plan, begun) and self._graphs.fits(rows):
            outcome = self._replay(self._graphs, plan, rows, begun.asked)
        else:
            outcome = self._eager(plan, rows, begun)
        if self._parts.states is not None:
            self._parts.states.advance(plan)
        return outcome

    # ---- graphs

    def _can_replay(self, plan: LanguagePlan, begun: Begun) -> bool:
        """Faults in the middle of a step need a middle."""
        disturbed = begun.poisoned or self._parts.faults.is_armed(MID_LANGUAGE_STEP)
        return not plan.chunks and not disturbed and bool(begun.asked.plain.all())

    def _replay(self, graphs: DecodeGraphs, plan: LanguagePlan, rows: StepRows, asked: Asked) -> Unread:
        draws = self._seats.draws.of(asked.seats, asked.num_generated)
        states = None if self._parts.states is None else self._parts.states.rows(plan)
        found = graphs.replay(rows, asked.seats, draws, states)
        self._seats.written(asked.seats)
        return Unread(len(asked.rows), asked.rows, self._parts.device.fetch(found))

    # ---- op by op

    def _eager(self, plan: LanguagePlan, rows: StepRows, begun: Begun) -> Samples | Unread:
        asked, seats, parts = begun.asked, self._seats, self._parts
        on_host = np.flatnonzero(~asked.plain)
        draws = seats.draws.of(asked.seats, asked.num_generated)
        beside = (asked.seats, on_host, *draws)
        inputs, (device_seats, host_rows, *columns) = self._sent(plan, rows, begun.scoring, beside)
        logits = self._forward(self._resolved(inputs, plan.decodes, device_seats))
        self._poison(logits, self._poisoned(plan, begun))
        if not len(asked.rows):
            return self._without_tokens(plan, begun)
        tokens, finite = parts.ops.sample(logits, Draws(*columns))
        outcome: Samples | Unread
        if on_host.size or begun.scoring is not None:
            picked = parts.device.fetch((tokens, finite, logits.index_select(0, host_rows)))
            token_ids, is_finite, host_logits = picked.result()
            outcome = sampled(plan.num_rows, asked.rows, token_ids, is_finite)
            tokens = self._sample_on_host(outcome, asked, on_host, host_logits.astype(np.float32, copy=False), tokens)
            if begun.scoring is not None:
                begun.scoring.put(outcome)
        else:
            outcome = Unread(plan.num_rows, asked.rows, parts.device.fetch((tokens, finite)))
        seats.write(device_seats, tokens)
        seats.written(asked.seats)
        return outcome

    def _resolved(self, inputs: LanguageInput, decodes: DecodeRows, seats: Tensor) -> LanguageInput:
        """With the tokens of decodes that nobody has read. `seats` begin with those of the decodes."""
        count = len(decodes)
        if not (decodes.token_ids < 0).any():
            return inputs
        head, rest = inputs.token_ids[:count], inputs.token_ids[count:]
        # What was sent may be the plan's own memory: nothing is written there.
        known = self._seats.resolve(head, seats[:count])
        return replace(inputs, token_ids=torch.cat((known, rest)) if rest.shape[0] else known)

    def _poison(self, logits: Tensor, rows: Ints) -> None:
        if rows.size:
            logits.index_fill_(0, self._parts.device.send((rows,))[0], float("nan"))

    def _without_tokens(self, plan: LanguagePlan, begun: Begun) -> Samples | Unread:
        """No row asked for a token; the fetch says when the step has ended."""
        fetch = self._parts.device.fetch(())
        if begun.scoring is None:
            return Unread(plan.num_rows, begun.asked.rows, fetch)
        fetch.result()
        samples = Samples.none(plan.num_rows)
        begun.scoring.put(samples)
        return samples

    def _sample_on_host(self, samples: Samples, asked: Asked, rows: Ints, logits: Logits, tokens: Tensor) -> Tensor:
        """Tokens of those `rows` that are finite, by their own recipes; returns all rows' tokens on the device."""
        for index, row_logits in zip(rows.tolist(), logits, strict=True):
            if samples.token_ids[asked.rows[index]] >= 0:
                self._draw(samples, asked, index, row_logits)
        chosen = samples.token_ids[asked.rows]
        self._seats.put(asked.seats[rows], chosen[rows])
        # The next step's input of a row that failed does not matter, but it must be a token.
        drawn = rows[chosen[rows] >= 0]
        if not drawn.size:
            return tokens
        return tokens.index_copy(0, *self._parts.device.send((drawn, chosen[drawn])))

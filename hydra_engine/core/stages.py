"""The stages of a request inside the engine and the moves between them that are legal."""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    ENCODE = "encode"  # some image of the prompt still has no features
    PREFILL = "prefill"  # prompt tokens (and, after a preemption, generated ones) wait for their KV
    DECODE = "decode"  # one token per step
    OFFERED = "offered"  # all that is done here is done, and another instance may fetch it
    FINISHED = "finished"


# OFFERED -> ENCODE: an older request has taken features before they were fetched.
# A preempted request goes back to where its missing work is: DECODE -> PREFILL, or ENCODE if features are gone too.
# ENCODE -> DECODE: somebody else has computed all that it lacked.
LEGAL_MOVES: dict[Stage, frozenset[Stage]] = {
    Stage.ENCODE: frozenset({Stage.PREFILL, Stage.DECODE, Stage.OFFERED, Stage.FINISHED}),
    Stage.PREFILL: frozenset({Stage.ENCODE, Stage.DECODE, Stage.OFFERED, Stage.FINISHED}),
    Stage.DECODE: frozenset({Stage.ENCODE, Stage.PREFILL, Stage.OFFERED, Stage.FINISHED}),
    Stage.OFFERED: frozenset({Stage.ENCODE, Stage.FINISHED}),
    Stage.FINISHED: frozenset(),
}

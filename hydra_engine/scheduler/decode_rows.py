"""The rows of running decodes as the table of decodes exchanges them with planners and results."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hydra_engine.core.plans import DecodeRows, Int64s
from hydra_engine.core.state import Ending, RequestState
from hydra_engine.scheduler.timeline import Indices

Bools = npt.NDArray[np.bool_]


class Ready(NamedTuple):
    """Members that may compute a row; entry i of `starts` belongs to member i of `indices`. Valid until a member joins
    or leaves."""

    indices: Indices
    starts: Int64s  # [B] position of the member's next row
    num_keys: int  # sum of keys that these rows read

    @property
    def num_rows(self) -> int:
        return len(self.starts)


class NewTokens(NamedTuple):
    """The rows of a step whose requests continue or have just ended with this token; entry i of an [R] field belongs to
    row i. Deferred rows are not among them. The fields of messages are lists, which are not changed afterwards."""

    live: Bools | None  # [B] mask of these rows among the plan's rows; None: all
    request_ids: list[int]  # [R]
    positions: list[int]  # [R] number of tokens generated before
    token_ids: list[int]  # [R]
    ended: list[tuple[RequestState, Ending]]
    filled: list[tuple[RequestState, int]]  # (request, full blocks) if the row filled a KV block
    late: list[tuple[RequestState, float]]  # (request, time of the token before) if the token came late


class RowsInFlight(NamedTuple):
    """The rows of a plan in flight. With an `id_list`, row i belongs to member i while no member has left since
    (`num_left`)."""

    rows: DecodeRows
    id_list: list[int] | None  # request ids of the rows, if every member has one
    num_left: int  # members that had left when the rows were planned


def some(indices: Int64s, starts: Int64s) -> Ready:
    return Ready(indices, starts, int(starts.sum()) + len(starts))

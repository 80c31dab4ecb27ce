"""When somebody who was refused should try again. Does not know why."""

from __future__ import annotations

import math
from collections.abc import Sequence

MAX_RETRY_AFTER_S = 30


def retry_after_s(num_live: int, finish_times: Sequence[float]) -> int:
    """When a tenth of the queue will have drained at the pace of the latest finishes; whole seconds, 1 to 30."""
    if len(finish_times) < 2:
        return 1
    interval_s = (finish_times[-1] - finish_times[0]) / (len(finish_times) - 1)
    return min(max(1, math.ceil(interval_s * num_live / 10)), MAX_RETRY_AFTER_S)

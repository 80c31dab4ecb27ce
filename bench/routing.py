"""Times routing decisions, by the number of instances: where a request with pictures prefills, where they are encoded,
and where it decodes.

The router is that of the frontend, over instances that are all connected, report step times and hold random loads, to
which each choice adds its own.
Topologies: instances that can all do everything, and some that encode, prefill and decode.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from statistics import median, quantiles
from typing import Any

from bench.common import card, emit
from hydra_engine.core.ids import ImageDigest, RequestId
from hydra_engine.core.instances import Condition, Role
from hydra_engine.core.messages import ToInstance
from hydra_engine.core.reports import BudgetReport, Status, StepSpeeds, TransferReport
from hydra_engine.core.request import ImageItem, Request, Slo
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.frontend.request import Charge
from hydra_engine.frontend.routing.instances import Instances
from hydra_engine.frontend.routing.router import Route, Router

_PICTURES, _PATCHES = 2, 576


def _send(name: str, messages: Sequence[ToInstance]) -> None:
    """Sends nothing: nobody is there."""


def table(roles: list[str], seed: int) -> Instances:
    random = Random(seed)
    instances = Instances({f"i{n}": Role.parse(role) for n, role in enumerate(roles)}, _send)
    for name, load in instances.items():
        load.condition = Condition.READY
        load.pairs = set(instances) - {name}
        load.prefill_tokens, load.patches = random.randrange(4096), random.randrange(4 * _PATCHES)
        load.decodes = random.randrange(64)
        load.decode_tokens = load.decodes * random.randrange(200, 2000)
        counts: dict[str, Any] = dict.fromkeys(Status.__struct_fields__[:11], 0) | {"kv_blocks_total": 100}
        speeds = StepSpeeds({10: 0.04}, {4: 0.01, 6: 0.012}, {10: 0.02})
        copies = TransferReport(kv_s=1.0, kv_tokens=200_000, pull_s=1.1, feature_tokens=100_000)
        budget = BudgetReport(tpot_limit_s=0.04)
        instances.on_status(name, Status(**counts, budget=budget, speeds=speeds, transfer=copies))
        load.arriving_tokens = random.randrange(4096)
    return instances


def request(number: int) -> Request:
    images = tuple(
        ImageItem(
            digest=ImageDigest(bytes([number % 256, place]) * 16),
            width=336,
            height=336,
            num_patches=_PATCHES,
            num_tokens=_PATCHES,
            start=4 + place * _PATCHES,
            grid=(1, 24, 24),
        )
        for place in range(_PICTURES)
    )
    prompt = tuple(range(4 + _PICTURES * _PATCHES + 32))
    return Request(
        id=RequestId(number),
        prompt_token_ids=prompt,
        sampling=SamplingParams(),
        max_new_tokens=128,
        seed=0,
        arrival_s=0.0,
        images=images,
        slo=Slo(0.25, 0.04),
    )


def measure(roles: list[str], count: int) -> dict[str, list[float]]:
    """Seconds of a core for each of `count` choices, by what is chosen."""
    instances = table(roles, 0)
    router, charges = Router(instances), deque[Charge]()
    spent: dict[str, list[float]] = {"route": [], "decoder": [], "encoders": []}

    def timed(what: str, choose: Callable[[], Any]) -> Any:
        started = time.thread_time()
        chosen = choose()
        spent[what].append(time.thread_time() - started)
        return chosen

    for number in range(count):
        asked = request(number)
        route = timed("route", partial(router.route, asked))
        assert isinstance(route, Route)
        if route.moves:
            timed("decoder", partial(router.decoder, route.prefill, asked.num_prompt, asked.max_new_tokens))
        if route.remote_images:
            timed("encoders", partial(router.encoders, route.prefill, list(enumerate(asked.images))))
        prefill, tokens = instances[route.prefill], asked.num_prompt
        charges.append(Charge(prefill, prefill_tokens=tokens, patches=_PICTURES * _PATCHES))
        charges.append(Charge(instances[route.decode or route.likely_decoder], decode_tokens=tokens))
        while len(charges) > 4 * len(roles):
            charges.popleft().release()
    return spent


def topologies(count: int) -> dict[str, list[str]]:
    quarter = count // 4
    return {
        f"{count}EPD": ["EPD"] * count,
        f"{quarter}E+{quarter}P+{2 * quarter}D": ["E"] * quarter + ["P"] * quarter + ["D"] * (2 * quarter),
        f"{2 * quarter}EP+{2 * quarter}PD": ["EP"] * (2 * quarter) + ["PD"] * (2 * quarter),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", default="4,16,64,128,256,512", help="with commas (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=400, help="decisions for each (default: %(default)s)")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for count in map(int, arguments.instances.split(",")):
        for name, roles in topologies(count).items():
            for what, spent in measure(roles, arguments.requests).items():
                if len(spent) > 1:
                    middle_us, last_us = 1e6 * median(spent), 1e6 * quantiles(spent, n=100)[98]
                    row = {"topology": name, "instances": count, "what": what, "p50_us": middle_us, "p99_us": last_us}
                    rows.append(row)
                    print(f"{name:24} {what:9} p50 {middle_us:7.0f} us, p99 {last_us:7.0f} us", file=sys.stderr)
    emit({"bench": "routing", "card": card(), "rows": rows})


if __name__ == "__main__":
    main()

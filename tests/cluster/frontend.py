"""A frontend process without requests: supervises stand-ins, prints what happens, word by word, until killed.

`python -m tests.cluster.frontend TOPOLOGY SUSPECT_S FENCE_S`. The first line has the process ids of the instances.
"""

from __future__ import annotations

import asyncio
import sys

from hydra_engine.cluster.supervisor import Supervisor
from hydra_engine.config import ClusterConfig, EngineConfig
from tests.cluster.recorder import Recorder
from tests.cluster.stand_in import COMMAND


async def main(topology: str, suspect_s: str, fence_s: str) -> None:
    cluster = ClusterConfig(suspect_s=float(suspect_s), fence_s=float(fence_s))
    supervisor = Supervisor(EngineConfig(topology=topology, cluster=cluster), processes=True, command=COMMAND)
    recorder = Recorder()
    links = await recorder.start(supervisor)
    print(*(link.pid for link in links), flush=True)
    told = len(recorder.events)
    while True:
        await asyncio.sleep(0.02)
        for event in recorder.events[told:]:
            print(*event, flush=True)
        told = len(recorder.events)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

"""Entry point of a process that serves HTTP for the one with the engine: `python -m hydra_engine.server.front_worker
--fd N --listen N,N`, started by `front_workers.py`.

The same application on the same port as that process would have, with all that is shared behind the relay. Signals are
the other process's business; when it is gone this one ends at once. Loads neither torch nor a tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import socket
import sys

from hydra_engine import log
from hydra_engine.cluster.process import die_with_parent
from hydra_engine.server import access
from hydra_engine.server import relay_wire as wire
from hydra_engine.server.app import House, furnish
from hydra_engine.server.listening import SWITCH_S, Sharing
from hydra_engine.server.relay_client import RelayClient
from hydra_engine.server.relay_link import Link
from hydra_engine.server.remote_commons import RemoteCommons
from hydra_engine.server.remote_engine import RemoteEngine

EXIT_ORPHANED = 70
BEAT_S = 1.0


async def work(channel: socket.socket, sockets: list[socket.socket]) -> int:
    """Serves until it is told to stop; the exit code of the process."""
    link = Link(wire.decode_to_worker, wire.MAX_DOWN_BYTES)
    link.on_closed = lambda: os._exit(EXIT_ORPHANED)
    client, stopping = RelayClient(link), asyncio.Event()
    client.on_shutdown = stopping.set
    await link.open(channel)
    start = await client.start
    config = start.config
    log.configure(start.log_level, instance=start.name, log_format=start.log_format)
    if config.access_log != "off":
        access.turn_on(config.access_log, start.name)
    commons = RemoteCommons(client, asks_for_rate=config.requests_per_minute > 0, spare_bytes=start.spare_bytes)
    engine = RemoteEngine(client, start.model_name, start.created)
    house = House(commons, client.keys, start.secret, start.model_name, commons.lifecycle, start.debug_endpoints)
    sharing = await Sharing.open(furnish(engine, config, house), sockets)
    gc.collect()
    gc.freeze()
    link.send(wire.Hello())
    beating = asyncio.create_task(_beat(commons))
    await stopping.wait()
    await sharing.close()
    beating.cancel()
    commons.beat()
    closed = asyncio.Event()
    link.on_closed = closed.set
    link.finish()
    await closed.wait()
    return 0


async def _beat(commons: RemoteCommons) -> None:
    while True:
        await asyncio.sleep(BEAT_S)
        commons.beat()


def main() -> int:
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(description="internal: HTTP for hydra-engine")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--listen", required=True)
    arguments = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    sockets = [socket.socket(fileno=int(number)) for number in arguments.listen.split(",")]
    return asyncio.run(work(socket.socket(fileno=arguments.fd), sockets))


if __name__ == "__main__":
    sys.exit(main())

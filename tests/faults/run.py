"""Runs an instance with fault points: the real one with a worker, an exchange and a migration that can be made to
fail. `SetFault` arms a point.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

from hydra_engine.config import EngineConfig
from hydra_engine.core.messages import ToInstance
from hydra_engine.errors import ConfigError
from hydra_engine.instance import hooks
from hydra_engine.instance.build import run_instance as run_real_instance
from hydra_engine.instance.hooks import Connect
from hydra_engine.instance.ports import ALONE, Inbox, InstanceContext, Outbox
from hydra_engine.transfer.network import BlockNetwork
from tests.faults import SetFault
from tests.faults.migration import FaultyMigration
from tests.faults.points import FaultPoints
from tests.faults.worker import FaultyExchange, FaultyWorker

logger = logging.getLogger(__name__)


class _Inbox:
    """The inbox of an instance, with the messages that arm fault points taken out."""

    def __init__(self, inbox: Inbox, faults: FaultPoints) -> None:
        self._inbox, self._faults = inbox, faults

    def drain(self) -> list[ToInstance]:
        return [message for message in self._inbox.drain() if not self._arm(message)]

    def _arm(self, message: ToInstance) -> bool:
        if not isinstance(message, SetFault):
            return False
        try:
            self._faults.arm(message.point, message.action, message.argument)
        except ConfigError as error:
            logger.error("fault point refused: %s", error.message)
        return True


def run_instance(
    config: EngineConfig,
    name: str,
    inbox: Inbox,
    outbox: Outbox,
    wake: threading.Event,
    context: InstanceContext = ALONE,
    connect: Connect | None = None,
    network: BlockNetwork | None = None,
) -> int:
    faults = FaultPoints()
    if connect is not None:  # then this process is the instance's own
        hooks.Exchange = partial(FaultyExchange, faults=faults)  # type: ignore[assignment, misc]
        hooks.Migration = partial(FaultyMigration, faults=faults)  # type: ignore[assignment, misc]
    worker: Any = partial(FaultyWorker, faults=faults)
    armed = _Inbox(inbox, faults)
    return run_real_instance(config, name, armed, outbox, wake, context, connect, worker_class=worker, network=network)

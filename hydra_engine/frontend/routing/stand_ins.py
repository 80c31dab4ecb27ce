"""Instances that serve a stage beside their own while nobody else can: those that were loaded with the weights for it.

Decides over the table of instances. What a stand-in has begun it finishes there; it gets nothing new once the stage is
served without it. No clock and no messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_

from hydra_engine.core.roles import Role
from hydra_engine.frontend.routing.instances import Instances, missing_now

logger = logging.getLogger(__name__)


class StandIns:
    """`set_role` tells an instance what it serves from now on, after restarts too."""

    def __init__(self, instances: Instances, set_role: Callable[[str, Role], None]) -> None:
        self._instances = instances
        self._set_role = set_role
        self._own: dict[str, Role] = {}  # of those that stand in

    def look(self, loaded: Mapping[str, Role], stages: Role) -> bool:
        """Call this when an instance is lost or there again, and while roles are not being switched. `loaded`: what
        each instance has weights for; `stages`: those that the model has. True: a stage that nobody served has found
        somebody."""
        table = self._instances
        before = {name: table[name].role for name in self._own}
        for name, own in self._own.items():
            table[name].role = own
        if missing_now(table.values(), images=Role.E in stages) is not None:
            for name, role in before.items():
                if table[name].usable:
                    table[name].role = role
            usable = [instance for instance in table.values() if instance.usable]
            unserved = stages & ~reduce(or_, (instance.role for instance in usable), Role(0))
            for instance in usable:
                if lent := unserved & loaded.get(instance.name, Role(0)):
                    self._own.setdefault(instance.name, instance.role)
                    instance.role |= lent
        took = [self._settle(name, before.get(name, own)) for name, own in list(self._own.items())]
        return any(took)

    def end(self) -> None:
        """Ends all stand-ins."""
        for name, own in self._own.items():
            self._instances[name].role = own
            self._set_role(name, own)
        self._own.clear()

    def _settle(self, name: str, before: Role) -> bool:
        """Tells the instance its role, if that has changed. True: it has got a stage."""
        role, own = self._instances[name].role, self._own[name]
        if role == own:
            del self._own[name]
        if role == before:
            return False
        self._set_role(name, role)
        if role == own:
            logger.info("instance %s serves %s again, and no more for others", name, own.letters)
            return False
        logger.warning("instance %s serves %s as well, which nobody else does", name, (role & ~own).letters)
        return True

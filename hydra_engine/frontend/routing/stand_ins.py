"""Stand-ins: instances that also serve a stage that no other instance serves, if they were loaded with its weights.

Decides over the table of instances. A stand-in finishes the requests that it has started; it gets no new ones once the
stage is served without it. Reads no clock, sends no messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_

from hydra_engine.core.instances import Role
from hydra_engine.frontend.routing.instances import Instances, missing_now

logger = logging.getLogger(__name__)


class StandIns:
    """The stand-ins and their own roles. `set_role` sets the role of an instance, after restarts too."""

    def __init__(self, instances: Instances, set_role: Callable[[str, Role], None]) -> None:
        self._instances = instances
        self._set_role = set_role
        self.own_roles: dict[str, Role] = {}  # of the stand-ins

    def update(self, loaded: Mapping[str, Role], stages: Role) -> bool:
        """Chooses the stand-ins. Call it when an instance is lost or returns, but not while roles are being switched.
        `loaded`: the stages that each instance has weights for; `stages`: the stages of the model. Returns True if an
        unserved stage is served now."""
        table = self._instances
        before = {name: table[name].role for name in self.own_roles}
        for name, own in self.own_roles.items():
            table[name].role = own
        if missing_now(table.values(), images=Role.E in stages) is not None:
            for name, role in before.items():
                if table[name].usable:
                    table[name].role = role
            usable = [instance for instance in table.values() if instance.usable]
            unserved = stages & ~reduce(or_, (instance.role for instance in usable), Role(0))
            for instance in usable:
                if lent := unserved & loaded.get(instance.name, Role(0)):
                    self.own_roles.setdefault(instance.name, instance.role)
                    instance.role |= lent
        took = [self._settle(name, before.get(name, own)) for name, own in list(self.own_roles.items())]
        return any(took)

    def end(self) -> None:
        for name, own in self.own_roles.items():
            self._instances[name].role = own
            self._set_role(name, own)
        self.own_roles.clear()

    def _settle(self, name: str, before: Role) -> bool:
        """Sends the instance its role if that has changed. Returns True if it has gained a stage."""
        role, own = self._instances[name].role, self.own_roles[name]
        if role == own:
            del self.own_roles[name]
        if role == before:
            return False
        self._set_role(name, role)
        if role == own:
            logger.info("instance %s serves %s again, and no more for others", name, own.letters)
            return False
        logger.warning("instance %s serves %s as well, which nobody else does", name, (role & ~own).letters)
        return True

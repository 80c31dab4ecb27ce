"""The attacks on a server, by group: a module each."""

from __future__ import annotations

from tests.campaigns.siege.cases import (
    children,
    folders,
    grammars,
    hosts,
    inward,
    mixed,
    products,
    starts,
    tenants,
    turns,
)
from tests.campaigns.siege.stage import Case

# Seconds of the five minutes that each group may take; those with a search or random moments use them up.
SECONDS = {
    "tenants": 15,
    "products": 25,
    "grammars": 30,
    "hosts": 35,
    "inward": 25,
    "turns": 25,
    "children": 30,
    "starts": 40,
    "folders": 60,
    "mixed": 30,
    "climb": 20,
}

AT_ONCE = {"folders": 2}  # processes of their own, which do not meet

CASES: tuple[Case, ...] = (
    *tenants.CASES,
    *products.CASES,
    *grammars.CASES,
    *hosts.CASES,
    *inward.CASES,
    *turns.CASES,
    *children.CASES,
    *starts.CASES,
    *folders.CASES,
    *mixed.CASES,
)

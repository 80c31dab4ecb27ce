"""What holds for all tests."""

import gc

from tests.examples import register_profiles

register_profiles()
# Ten thousand tests and what they import are no garbage.
gc.disable()


def pytest_collection_finish() -> None:
    """What was loaded stays: full collections, which some tests ask for, pass over it."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()

"""What holds for all tests."""

import gc

from hypothesis import settings

# How long an example takes says how busy the machine is; speed is what benchmarks are for.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """What was loaded stays: full collections, which some tests ask for, pass over it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()

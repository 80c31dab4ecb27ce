"""What holds for all tests."""

import gc
import sys

from tests.examples import register_profiles

register_profiles()
# Ten thousand tests and what they import are no garbage.
gc.disable()


def pytest_collection_finish() -> None:
    """What was loaded stays: full collections, which some tests ask for, pass over it."""
    gc.collect()
    gc.freeze()
    gc.enable()
    # Of two processes side by side each would wait for both processors at every operation. Instances set their own.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_sessionfinish() -> None:
    gc.unfreeze()

"""Number of examples that a property is tried with. Every run draws others, so a quick one need not try them all:

    pytest --hypothesis-profile=thorough

does, as `make test-all` says.
"""

from hypothesis import settings

THOROUGH = "thorough"
_QUICK_PART = 8  # of so many examples a quick run tries one
_FEWEST = 4
_QUICK = 12  # of a property that does not say how many it wants


def register_profiles() -> None:
    """Sets no deadline: an example's time says how busy the machine is, and speed is what benchmarks are for."""
    settings.register_profile(THOROUGH, deadline=None)
    settings.register_profile("quick", deadline=None, max_examples=_QUICK)
    settings.load_profile("quick")


def is_thorough() -> bool:
    return settings.get_current_profile_name() == THOROUGH


def examples(count: int) -> int:
    """`count`, or a part of it in a quick run."""
    return count if is_thorough() else max(count // _QUICK_PART, min(count, _FEWEST))

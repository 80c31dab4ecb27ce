"""How many examples a property is tried with. Every run draws others, so a quick one need not try them all:

    pytest --hypothesis-profile=thorough

does, as `make test-all` says.
"""

from hypothesis import settings

THOROUGH = "thorough"
_QUICK_PART = 8  # of so many examples a quick run tries one
_FEWEST = 4


def register_profiles() -> None:
    """How long an example takes says how busy the machine is, and speed is what benchmarks are for."""
    for name in ("quick", THOROUGH):
        settings.register_profile(name, deadline=None)
    settings.load_profile("quick")


def is_thorough() -> bool:
    return settings.get_current_profile_name() == THOROUGH


def examples(count: int) -> int:
    """`count`, or a part of it in a quick run."""
    return count if is_thorough() else max(count // _QUICK_PART, min(count, _FEWEST))

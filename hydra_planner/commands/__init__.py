"""The commands that `hydra-engine` finds by the entry points in pyproject.toml."""

from hydra_engine.cli.commands import Command

PLAN = Command(
    "find the topology that keeps latency limits at the highest rate or the least cost, in simulated time",
    "hydra_planner.commands.plan",
)
REPRODUCE = Command(
    "repeat the experiments of the papers that the engine builds on, by simulation and closed forms",
    "hydra_planner.commands.reproduce",
)

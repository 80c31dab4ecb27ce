"""The commands that `hydra-engine` finds by the entry points in pyproject.toml."""

from hydra_engine.cli.commands import Command

PLAN = Command(
    "find the topology that keeps latency limits at the highest rate or the least cost, in simulated time",
    "hydra_planner.commands.plan",
    position=51,
)
REPRODUCE = Command(
    "repeat the experiments of the papers that the engine builds on, by simulation and closed forms",
    "hydra_planner.commands.reproduce",
    position=52,
)
PROFILE = Command(
    "measure step times on this machine, save them, and print what a latency limit allows",
    "hydra_planner.commands.profile",
    position=53,
)
MEMORY = Command(
    "print the memory of each instance of a topology and what its role saves; loads no weights",
    "hydra_planner.commands.memory",
    position=55,
)

"""Commands for a person at a terminal: a chat with an engine or with any server of OpenAI's API, answers to a file of
requests, a load generator and benchmarks of the source tree, models fetched and listed, and completion for shells.

A package beside the engine, in the same wheel: it uses the engine's settings, timelines and parsers.
"""

from hydra_engine.cli.commands import Command

RUN = Command("start an engine and chat with it in the terminal", "hydra_terminal.run", position=15)
CHAT = Command("chat with a running server in the terminal", "hydra_terminal.chat", position=21)
RUN_BATCH = Command(
    "answer a file of requests in OpenAI's batch format with an embedded engine",
    "hydra_terminal.run_batch",
    position=30,
)
PULL = Command("fetch a model of the Hugging Face Hub into its cache", "hydra_terminal.pull", position=31)
LIST = Command("list the models of the Hugging Face cache and of folders", "hydra_terminal.list_models", position=32)
BENCH = Command("send a load to a server, or run a benchmark of the source tree", "hydra_terminal.bench", position=50)
COMPLETION = Command("print a completion script for bash, zsh or fish", "hydra_terminal.completion", position=80)

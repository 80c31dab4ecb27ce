"""The commands for a person at a terminal that start no engine: a chat client for any server with OpenAI's API, and
completion for shells.

A package beside the engine, in the same wheel: it uses the engine's settings, timelines and parsers.
"""

from hydra_engine.cli.commands import Command

CHAT = Command("chat with a running server in the terminal", "hydra_terminal.chat", position=21)
COMPLETION = Command("print a completion script for bash, zsh or fish", "hydra_terminal.completion", position=80)

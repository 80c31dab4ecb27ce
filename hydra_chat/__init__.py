"""Chats in the terminal with any server of OpenAI's API, over HTTP.

A package beside the engine, in the same wheel: it uses the engine's settings and timelines, and no engine.
"""

from hydra_engine.cli.commands import Command

CHAT = Command("chat with a running server in the terminal", "hydra_chat.chat", position=21)

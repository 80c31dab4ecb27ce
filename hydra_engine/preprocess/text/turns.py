"""Rearranges turns that a chat template refuses, or drops, in the order given.

A later system turn becomes a user turn in the same position, so that the prompt before it is unchanged and may be
cached. Adjacent turns of one role are joined, and a user turn after a tool result becomes part of that result. Turns
that the template takes are unchanged. Does not know templates: `takes` answers for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hydra_engine.core.call import ChatMessage, MediaPart, Role, TextPart

# True: the template writes all texts of a conversation of these roles; False: it drops some; None: it refuses. An
# assistant before a tool calls it.
Takes = Callable[[tuple[Role, ...]], bool | None]
_CALL: tuple[Role, ...] = ("user", "assistant", "tool")


def arrange_turns(messages: Sequence[ChatMessage], takes: Takes) -> tuple[ChatMessage, ...]:
    turns = list(messages)
    first = next((index for index, turn in enumerate(turns) if turn.role != "system"), len(turns))
    if first and takes(("system", "user")) is None and takes(("user",)):
        first = 0
    if first > 1 and not takes(("system", "system", "user")):
        turns[:first] = _joined(turns[:first], "system", "system")
        first = 1
    late = [turn for turn in turns[first:] if turn.role == "system"]
    if late and not (first == len(turns) or takes(("user", "system", "assistant", "system", "user"))):
        turns[first:] = [replace(turn, role="user") if turn.role == "system" else turn for turn in turns[first:]]
    if _meet(turns, "user", "user") and not takes(("user", "user")):
        turns = _joined(turns, "user", "user")
    if _meet(turns, "assistant", "assistant") and not takes(("user", "assistant", "assistant")):
        turns = _joined(turns, "assistant", "assistant")
    if _meet(turns, "tool", "user") and takes(_CALL) and not takes((*_CALL, "user")):
        turns = _joined(turns, "tool", "user")
    return tuple(turns)


def _meet(turns: Sequence[ChatMessage], role: Role, behind: Role) -> bool:
    return any((one.role, other.role) == (role, behind) for one, other in pairwise(turns))


def _joined(turns: Sequence[ChatMessage], role: Role, behind: Role) -> list[ChatMessage]:
    """Returns the turns with each `behind` turn joined to the `role` turn before it."""
    found: list[ChatMessage] = []
    for turn in turns:
        if found and (found[-1].role, turn.role) == (role, behind):
            found[-1] = _one_turn(found[-1], turn)
        else:
            found.append(turn)
    return found


def _one_turn(turn: ChatMessage, more: ChatMessage) -> ChatMessage:
    return replace(
        turn,
        content=_content(turn.content, more.content),
        tool_calls=turn.tool_calls + more.tool_calls,
        others={**turn.others, **more.others, **_texts_of_both(turn.others, more.others)},
    )


Content = str | tuple[TextPart | MediaPart, ...]


def _content(content: Content, more: Content) -> Content:
    if not content or not more:
        return content or more
    if isinstance(content, str) and isinstance(more, str):
        return f"{content}\n\n{more}"
    *before, last = (TextPart(content),) if isinstance(content, str) else content
    first, *behind = (TextPart(more),) if isinstance(more, str) else more
    if isinstance(last, TextPart) and isinstance(first, TextPart):
        return (*before, TextPart(f"{last.text}\n\n{first.text}"), *behind)
    return (*before, last, first, *behind)


def _texts_of_both(others: Any, more: Any) -> dict[str, str]:
    """Joins the texts of fields that both turns have, such as reasoning."""
    names = [name for name in others if isinstance(others[name], str) and isinstance(more.get(name), str)]
    return {name: f"{others[name]}\n\n{more[name]}" for name in names if name != "name"}

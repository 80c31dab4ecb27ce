"""A tool call in the format of Qwen3-Coder and Qwen3.5, read character by character:

    <function=NAME>
    <parameter=P>
    VALUE
    </parameter>
    </function>

Does not know the text around a call.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hydra_engine.server.tools.tool_objects import SPACE, Output

FUNCTION, PARAMETER = "<function=", "<parameter="
_END, _PARAMETER_END = "</function>", "</parameter>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_MARKS = (FUNCTION, PARAMETER, _END, _PARAMETER_END)
# Marks of which one must follow an end; without it the end is text of the value.
_BEHIND = {_PARAMETER_END: (PARAMETER, _END, _CALL_END), _END: (_CALL_END, _CALL, FUNCTION)}
_PLAIN = re.compile(r"[^<\r\n]+")
_MAX_NAME = 256
_MAX_SPACE = 64  # white space between an end and the next mark
_MAX_LITERAL = 1 << 16
_STRING = frozenset({"string"})
_MAX_DEPTH = 16  # nesting of references and choices in a schema
_KINDS: dict[type, str] = {
    **{bool: "boolean", int: "integer", float: "number"},
    **{str: "string", list: "array", dict: "object", type(None): "null"},
}


class FunctionBlock:
    """A parser of one call. `state` is reading, done (a closing mark may follow) or failed (not a call). Once `begun`,
    arguments go to the output as JSON: strings as they grow, other values when they are complete.

    A value may hold any text, including marks: an end counts only if one of the marks that may follow it does, and
    parameters and functions that begin a line inside a value need their own ends. A parameter also ends without its
    mark if the next one that the schema knows begins a line.
    """

    def __init__(
        self, names: Collection[str], parameters: Mapping[str, Mapping[str, Any]], output: Output, before: str
    ) -> None:
        """Starts a call. `before`: text of the call before `<function=`, needed if it turns out to be content."""
        self._names = names
        self._parameters = parameters
        self._output = output
        self.state = "reading"
        self.begun = False
        self._raw = [before]
        self._held = ""
        self._step = self._in_name
        self._schema: Mapping[str, Any] = {}
        self._name = ""
        self._given: set[str] = set()
        self._parameter = ""
        self._types: frozenset[str] = _STRING
        self._value: list[str] = []  # parts of a value that is sent when complete
        self._at_start = False  # no character of the value has been read
        self._is_line = False  # the held text begins a line of the value
        self._nested_parameters = 0
        self._nested_functions = 0

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    @property
    def is_cut(self) -> bool:
        """True if a text that ends here ends inside the call."""
        return self.begun and self.state != "done"

    def parse(self, char: str) -> str:
        if not self.begun:
            self._raw.append(char)
        self._held += char
        while self.state == "reading" and self._held and self._step():
            pass
        return self.state

    def skip(self, text: str, begin: int) -> int:
        """Consumes characters of `text` from `begin` on that can only belong to a value; returns the index of the
        rest."""
        if self._held or self._at_start or self._step != self._in_value:
            return begin
        found = _PLAIN.match(text, begin)
        if found is None:
            return begin
        self._held = found[0]
        self._take(len(self._held))
        return found.end()

    def finish(self) -> None:
        """Ends the text: an end mark that waited for its follower counts."""
        if self._step == self._in_value and self._held.lstrip(SPACE).rstrip(SPACE) == _END:
            self._close_value()
            self._end()

    # ---- steps: each consumes held text; True if it did

    def _in_name(self) -> bool:
        name = self._name_behind(FUNCTION)
        if name is not None:
            self._name = name
            self._schema = self._parameters.get(name, {})
            self._step = self._behind_name
            if name not in self._names:
                self.state = "failed"
        return name is not None

    def _behind_name(self) -> bool:
        """Waits for a parameter or the end: only these show that the text is a call and not words about the
        function."""
        held = self._held = self._held.lstrip(SPACE)
        if held.startswith((PARAMETER, _END)):
            self.begun = True
            self._output.start(self._name)
            self._step = self._between
            return True
        if not any(mark.startswith(held) for mark in (PARAMETER, _END)):
            self.state = "failed"
        return False

    def _between(self) -> bool:
        """Finds the next parameter or the end; other text is dropped."""
        place = self._held.find("<")
        self._held = "" if place < 0 else self._held[place:]
        if self._held.startswith((_END, _CALL_END)):
            self._end()
        elif self._held.startswith(PARAMETER):
            name = self._name_behind(PARAMETER)
            if name is None:
                return False
            self._begin_value(name)
            return True
        elif self._held and not any(mark.startswith(self._held) for mark in (PARAMETER, _END, _CALL_END)):
            self._held = self._held[1:]
            return True
        return False

    def _in_value(self) -> bool:
        if self._at_start:
            if self._held == "\r":
                return False
            self._held = self._held.removeprefix("\r").removeprefix("\n")
            self._at_start = False
            self._is_line = True
            return True
        place = self._held.find("<")
        if place < 0:
            text = _without_break(self._held)
            self._take(len(text))
            return False
        break_ = self._held[len(_without_break(self._held[:place])) : place]
        self._take(place - len(break_))
        rest = self._held[len(break_) :]
        mark = next((mark for mark in _MARKS if rest.startswith(mark)), None)
        if mark is None:
            if any(mark.startswith(rest) for mark in _MARKS):
                return False
            self._take(len(break_) + 1)
            return True
        return self._at_mark(mark, rest, len(break_))

    def _at_mark(self, mark: str, rest: str, num_break: int) -> bool:
        begins_line = bool(num_break) or self._is_line
        length = num_break + len(mark)
        if mark == FUNCTION:
            self._nested_functions += begins_line
        elif mark == PARAMETER:
            end = rest.find(">")
            name = rest[len(mark) : end] if end >= 0 else ""
            if end < 0 and len(rest) < _MAX_NAME and "\n" not in rest:
                return False
            if begins_line and end >= 0 and self._is_next(name.strip()):
                self._close_value(num_break)
                return True
            self._nested_parameters += begins_line
        elif mark == _PARAMETER_END and self._nested_parameters:
            self._nested_parameters -= 1
        elif mark == _END and self._nested_functions:
            self._nested_functions -= 1
        else:
            behind = rest[len(mark) :].lstrip(SPACE)
            num_space = len(rest) - len(mark) - len(behind)
            if not any(follower.startswith(behind[: len(follower)]) for follower in _BEHIND[mark]):
                self._take(length)
                return True
            if not any(behind.startswith(follower) for follower in _BEHIND[mark]) and num_space < _MAX_SPACE:
                return False  # undecided: needs more text
            self._close_value(length if mark == _PARAMETER_END else num_break)
            if mark == _END:
                self._end()
            return True
        self._take(length)
        return True

    # ---- actions of the steps

    def _name_behind(self, mark: str) -> str | None:
        """Consumes a mark with its name; None if it is incomplete. Before the call has begun, an impossible name sets
        `failed`."""
        end = self._held.find(">")
        name = self._held[len(mark) : end if end >= 0 else None]
        if len(name) > _MAX_NAME or "\n" in name or "<" in name:
            self.state = "failed" if not self.begun else self.state
            self._held = self._held if not self.begun else self._held[1:]
            return None
        if end < 0:
            return None
        self._held = self._held[end + 1 :]
        return name.strip().strip("\"'")

    def _is_next(self, name: str) -> bool:
        """True if `name` is a parameter of the function that may follow the current one."""
        known = self._schema.get("properties")
        is_known = name in known if isinstance(known, Mapping) and known else True
        nested = self._nested_functions or self._nested_parameters
        return is_known and not nested and name not in self._given

    def _begin_value(self, name: str) -> None:
        begin = ", " if self._given else "{"
        self._output.arguments(f"{begin}{_json(name)}: ")
        self._parameter = name
        self._given.add(name)
        known = self._schema.get("properties")
        schema = known.get(name) if isinstance(known, Mapping) else None
        self._types = types_of(schema, self._schema)
        self._value = []
        self._at_start = self._is_line = True
        self._nested_functions = self._nested_parameters = 0
        if self._types == _STRING:
            self._output.arguments('"')
        self._step = self._in_value

    def _take(self, num_chars: int) -> None:
        """Adds the first `num_chars` held characters to the value."""
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        if text:
            self._is_line = text.endswith("\n")
            if self._types == _STRING:
                self._output.arguments(_json(text)[1:-1])
            else:
                self._value.append(text)

    def _close_value(self, num_chars: int = 0) -> None:
        """Ends the value; the first `num_chars` held characters are its end mark."""
        self._held = self._held[num_chars:]
        self._output.arguments('"' if self._types == _STRING else as_json("".join(self._value), self._types))
        self._step = self._between

    def _end(self) -> None:
        self._output.arguments("}" if self._given else "{}")
        self.state = "done"


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _without_break(text: str) -> str:
    """Strips the line break at the end, which may belong to a mark."""
    if text.endswith("\r\n"):
        return text[:-2]
    return text[:-1] if text.endswith(("\n", "\r")) else text


# ---- values by their types


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """JSON types that a parameter may have; string if the schema names none."""
    return frozenset(_types(schema, root, 0)) or _STRING


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    kind = schema.get("type")
    if isinstance(kind, str):
        yield kind
    elif isinstance(kind, list):
        yield from (one for one in kind if isinstance(one, str))
    elif "const" in schema:
        yield _KINDS.get(type(schema["const"]), "string")
    elif isinstance(schema.get("enum"), list):
        yield from (_KINDS.get(type(value), "string") for value in schema["enum"])
    elif isinstance(schema.get("$ref"), str):
        yield from _types(_referred(schema["$ref"], root), root, depth + 1)
    else:
        for name in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(name)
            for branch in branches if isinstance(branches, list) else ():
                yield from _types(branch, root, depth + 1)


def _referred(reference: str, root: Any) -> Any:
    for name in reference.removeprefix("#").split("/")[1:]:
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def as_json(text: str, types: frozenset[str]) -> str:
    """A value as JSON of one of these types; a string if it fits none of them."""
    stripped = text.strip()
    others = types - _STRING
    if not others:
        return _json(text)
    value, known = _parsed(stripped)
    if known and ("string" not in types or _fits(value, others)):
        return stripped
    word = stripped.lower()
    if word in ("true", "false") and "boolean" in types:
        return word
    if word == "none" and "null" in types and "string" not in types:
        return "null"
    if others & {"object", "array"} and stripped[:1] in ("{", "[", "(") and len(stripped) < _MAX_LITERAL:
        try:  # a Python literal
            return json.dumps(ast.literal_eval(stripped), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            pass
    return _json(text)


def _parsed(text: str) -> tuple[Any, bool]:
    try:
        return json.loads(text, parse_constant=_refuse), True
    except (ValueError, RecursionError):
        return None, False


def _refuse(word: str) -> None:
    """Rejects NaN and infinities, which are not JSON."""
    raise ValueError(word)


def _fits(value: object, types: frozenset[str]) -> bool:
    kind = _KINDS.get(type(value), "")
    return kind in types or (kind == "integer" and "number" in types)

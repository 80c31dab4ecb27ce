"""Reading JSON files of a model directory with type checks.

Every error is a `CheckpointError` of one sentence that names the file and the field. Does not know what any field
means.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hydra_engine.core.model_folder import read_file
from hydra_engine.errors import CheckpointError


def read_json(directory: Path, name: str) -> Fields:
    """Reads the object in `directory/name`. Raises CheckpointError if the file is missing."""
    fields = read_json_if_present(directory, name)
    if fields is None:
        raise CheckpointError(f"the model directory has no {name}")
    return fields


def read_json_if_present(directory: Path, name: str) -> Fields | None:
    data = read_file(directory, name)
    if data is None:
        return None
    try:
        values = json.loads(data)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{name} is not valid JSON: {error.msg} in line {error.lineno}") from None
    except (ValueError, RecursionError):  # not UTF-8, a number with thousands of digits, nested without end
        raise CheckpointError(f"{name} is not valid JSON text") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{name} must hold a JSON object")
    return Fields(values, name)


LARGEST = 2**31  # of sizes and counts
MAX_LAYERS = 1024  # of a decoder or a tower, whatever the weights have; drawn weights have any number
LARGEST_NUMBER = 1e38  # of other numbers, within float32
# Ends an error about something that only the native implementations do not support.
ELSEWHERE = "; --model-impl transformers runs what transformers can load"


class Fields:
    """A JSON object with checked access. `null` counts as absent, except in `is_null`.

    `default=None` in the typed getters makes the field mandatory."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """True if the field is present with the value null."""
        return name in self.values and self.values[name] is None

    def get(self, *names: str) -> Any:
        """Returns the first of `names` that is present and not null; None if there is none."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def section(self, name: str) -> Fields:
        value = self.section_if_present(name)
        if value is None:
            raise self.missing_field(name)
        return value

    def section_if_present(self, name: str) -> Fields | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong_value(name, "an object")
        return Fields(value, f"{name} of {self.where}")

    def integer(self, name: str, default: int | None = None, *, at_least: int = 1, at_most: int = LARGEST) -> int:
        value = self._value(name, default)
        if type(value) is not int or not at_least <= value <= at_most:
            raise self.wrong_value(name, f"a whole number from {at_least} to {at_most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a finite number above zero."""
        value = self._value(name, default)
        if type(value) not in (int, float) or not 0 < value <= LARGEST_NUMBER:
            raise self.wrong_value(name, f"a number above 0 and up to {LARGEST_NUMBER:g}")
        return float(value)

    def numbers(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """Returns as many finite numbers as `default` has."""
        value = self._value(name, list(default))
        numbers = value if isinstance(value, list) else []
        if len(numbers) != len(default) or not all(_is_finite(n) for n in numbers):
            raise self.wrong_value(name, f"a list of {len(default)} numbers")
        return tuple(map(float, numbers))

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.wrong_value(name, "a string")
        return value

    def token_text(self, name: str, default: str | None = None) -> str:
        """Returns a token's text; some files store an object with the text in `content`."""
        return self.section(name).text("content") if isinstance(self.get(name), dict) else self.text(name, default)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong_value(name, "true or false")
        return value

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        """Returns a token id or a list of them without duplicates; -1 is dropped. None if absent."""
        value = self.get(name)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if any(type(i) is not int or not -1 <= i <= LARGEST for i in ids):
            raise self.wrong_value(name, "a token id, a list of token ids, or -1 for none")
        return tuple(dict.fromkeys(i for i in ids if i >= 0))

    def missing_field(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.where} has no field {name}")

    def wrong_value(self, name: str, expected: str, advice: str = "") -> CheckpointError:
        return CheckpointError(f"{name} in {self.where} must be {expected}, not {str(self.get(name))[:40]!r}{advice}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is not None:
            return value
        if default is None:
            raise self.missing_field(name)
        return default


class TrackedFields(Fields):
    """Fields that record which names were read."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        super().__init__(values, where)
        self._read: set[str] = set()

    def get(self, *names: str) -> Any:
        self._read.update(names)
        return super().get(*names)

    def unread(self, prefix: str) -> list[str]:
        """Names with this prefix that were never read."""
        return [name for name in self.values if name.startswith(prefix) and name not in self._read]


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST_NUMBER

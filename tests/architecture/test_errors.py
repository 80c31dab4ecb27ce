"""The table of error codes is closed: whatever the code base can say to a client is in it, and documented."""

from __future__ import annotations

import ast

import pytest

from hydra_engine import errors
from tests.architecture.sources import PACKAGES, files_in, nodes_of


def codes_in_the_code() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in files_in(*PACKAGES):
        for node in nodes_of(path):
            if not isinstance(node, ast.keyword) or node.arg != "code" or not isinstance(node.value, ast.Constant):
                continue
            if isinstance(node.value.value, str):
                found[node.value.value] = f"{path.name}:{node.value.lineno}"
    return found


@pytest.mark.slow
def test_every_code_that_is_raised_is_in_the_table() -> None:
    for code, place in codes_in_the_code().items():
        assert code in errors.CODES, f"{place} uses {code!r}"


def test_every_error_class_survives_the_wire() -> None:
    for cls in errors._BY_NAME.values():
        error = cls("what to change", param="field")
        again = errors.from_info(error.info())
        assert type(again) is cls and again.message == error.message and again.param == "field"
        assert again.code == error.code and (error.code is None or error.code in errors.CODES)


def test_an_unknown_kind_becomes_a_failed_request() -> None:
    assert type(errors.from_info(errors.ErrorInfo("NoSuchError", "x"))) is errors.RequestFailed

"""The public API is documented: exported classes with an example, methods, operators and fields of sampling."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest

import hydra_engine
from hydra_engine import (
    BatchOptions,
    CallOptions,
    Engine,
    EngineConfig,
    Grammar,
    Handle,
    Result,
    SamplingParams,
    errors,
)
from hydra_engine.backend.base import Ops
from hydra_engine.backend.device import Device


def undocumented(cls: type) -> list[str]:
    members = inspect.getmembers(cls, lambda member: inspect.isfunction(member) or isinstance(member, property))
    return [f"{cls.__name__}.{name}" for name, member in members if not name.startswith("_") and not member.__doc__]


def test_exported_names_are_documented_and_their_main_classes_have_an_example() -> None:
    exported = [getattr(hydra_engine, name) for name in hydra_engine.__all__ if name != "__version__"]
    assert [thing.__name__ for thing in exported if not thing.__doc__] == []
    for cls in (Engine, EngineConfig, Grammar, Handle, Result, SamplingParams, Ops, Device):
        text = inspect.getdoc(cls) or ""
        assert "\n    " in text, f"{cls.__name__}: {text}"


def test_the_package_exports_the_errors_that_python_code_can_meet() -> None:
    of_the_server = {"InvalidApiKey", "NotFound", "MethodNotAllowed", "RequestTimeout", "RateLimited"}
    of_the_server |= {"PayloadTooLarge", "UnsupportedMediaType", "ExpectationFailed"}
    exported = {name for name in hydra_engine.__all__ if hasattr(errors, name)}
    assert exported == errors._BY_NAME.keys() - of_the_server - {"TransferError"}
    assert set(hydra_engine.__all__) <= set(dir(hydra_engine))
    assert hydra_engine.HydraError is errors.HydraError
    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        hydra_engine.Enigne


def test_methods_of_the_engine_and_operators_are_documented() -> None:
    assert undocumented(Engine) + undocumented(Ops) == []
    assert set(undocumented(Handle)) <= {"Handle.fail", "Handle.takes_pieces"}  # the frontend's side
    assert set(undocumented(Device)) <= {"Device.partitions"}


def test_every_parameter_of_a_request_is_explained() -> None:
    sampling = SamplingParams.__doc__ or ""
    assert [f.name for f in fields(SamplingParams) if f.name not in sampling] == []
    for options in (CallOptions, BatchOptions):
        own = options.__annotations__.keys() - {f.name for f in fields(SamplingParams)}
        inherited = CallOptions.__annotations__.keys() if options is BatchOptions else set()
        assert [name for name in own - inherited if name not in (options.__doc__ or "")] == []


def test_the_help_of_generate_lists_its_keywords() -> None:
    text, own = (
        Engine.generate.__doc__ or "",
        BatchOptions.__annotations__.keys() - {f.name for f in fields(SamplingParams)},
    )
    assert "`BatchOptions` in hydra_engine.frontend.call" in text and "Unpack[BatchOptions]" in str(
        inspect.signature(Engine.generate)
    )
    named = set(re.findall(r"\w+(?=[:,=])", text))
    assert own | {"grammar", "temperature", "max_tokens"} <= named

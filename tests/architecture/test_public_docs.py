"""The public API is documented: exported classes with an example, methods, operators and fields of sampling."""

from __future__ import annotations

import inspect
from dataclasses import fields

import hydra_engine
from hydra_engine import Engine, SamplingParams
from hydra_engine.backend.base import Ops
from hydra_engine.backend.device import Device
from hydra_engine.core.outputs import Piece, Result
from hydra_engine.frontend.call import BatchOptions, CallOptions
from hydra_engine.frontend.handle import Handle


def undocumented(cls: type) -> list[str]:
    members = inspect.getmembers(cls, lambda member: inspect.isfunction(member) or isinstance(member, property))
    return [f"{cls.__name__}.{name}" for name, member in members if not name.startswith("_") and not member.__doc__]


def test_exported_classes_have_an_example() -> None:
    exported = [getattr(hydra_engine, name) for name in hydra_engine.__all__ if name != "__version__"]
    for cls in (*exported, Handle, Result, Ops, Device):
        text = inspect.getdoc(cls) or ""
        assert "\n    " in text, f"{cls.__name__}: {text}"


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
    assert Piece.__doc__

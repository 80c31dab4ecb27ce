"""Tensors of an emulated device: each holds one of the host and lets nobody touch it but by the rules of a device.

Ops between tensors of the device are computed on the host at once. Host tensors beside them are refused as CUDA refuses
them; what makes CUDA wait is reported; accesses of two streams to one memory need an order between them; memory holds
garbage before it is written and after it is freed. Torch's dispatcher sees a device of its own (PrivateUse1), so that
`torch.zeros(.., device=..)` works in every thread. Does not know streams' meaning for the engine, nor kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.emulated.captures import Pool
from tests.emulated.clock import Clock
from tests.emulated.graphs import GARBAGE
from tests.emulated.streams import Stream, Streams
from tests.emulated.works import work_of_op
from tests.kernels.scaled_mm import scaled_mm

NAME = "emulated"

_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)

Storage = torch.UntypedStorage


class Present:
    """The device whose turn it is: torch's dispatcher is one for the process."""

    streams = Streams()
    total_bytes = 1 << 30
    used_bytes = 0
    reserved_bytes = 0  # what torch holds, also of what was freed
    peak_bytes = 0
    peak_reserved_bytes = 0
    blocks: ClassVar[dict[int, dict[int, Accesses]]] = {}  # of caches, by address and number

    @classmethod
    def begin(cls, total_bytes: int, clock: Clock | None = None) -> Streams:
        cls.streams, cls.total_bytes, cls.blocks = Streams(clock), total_bytes, {}
        cls.used_bytes = cls.reserved_bytes = cls.peak_bytes = cls.peak_reserved_bytes = 0
        cls.streams.memory = cls
        return cls.streams

    @classmethod
    def take(cls, num_bytes: int) -> None:
        cls.used_bytes += num_bytes
        cls.reserved_bytes = max(cls.reserved_bytes, cls.used_bytes)
        cls.peak_bytes = max(cls.peak_bytes, cls.used_bytes)
        cls.peak_reserved_bytes = max(cls.peak_reserved_bytes, cls.reserved_bytes)

    @classmethod
    @contextmanager
    def captured_in(cls, pool: Pool) -> Iterator[None]:
        """Gives allocations inside to the pool, which keeps them while a graph has the pool, unless the capture
        fails."""
        peak_bytes, before = cls.peak_bytes, cls.used_bytes
        cls.used_bytes = cls.peak_bytes = before - pool.num_bytes
        more = 0
        try:
            yield
            more = max(0, cls.peak_bytes - before)
        finally:
            cls.peak_bytes = max(cls.peak_bytes, peak_bytes)
            pool.num_bytes += more
            pool.give_back = partial(cls._give_back, cls.streams)
            cls.take(pool.num_bytes)

    @classmethod
    def _give_back(cls, streams: Streams, num_bytes: int) -> None:
        if streams is cls.streams:
            cls.used_bytes -= num_bytes


class Accesses:
    """The last write to something, and the reads since."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._written: tuple[Stream, int] | None = None
        self._read: dict[Stream, int] = {}

    def touch(self, stream: Stream, number: int, *, write: bool) -> None:
        before = self.users() if write else [self._written] if self._written is not None else []
        for other, earlier in before:
            if not stream.is_behind(other, earlier):
                verb = "writes" if write else "reads"
                self._streams.found(f"{stream.name} {verb} what {other.name} may be using still")
        if write:
            self._written, self._read = (stream, number), {}
        else:
            self._read[stream] = number

    def users(self) -> list[tuple[Stream, int]]:
        """The writer first."""
        return [*([self._written] if self._written is not None else []), *self._read.items()]


class Memory(Accesses):
    """An allocation, and the stream that owns it."""

    def __init__(self, storage: Storage, *, lasting: bool = False) -> None:
        super().__init__(Present.streams)
        self.storage = storage
        self.owner = self._streams.current
        self.lasting = lasting  # a graph's, or another process's: never filled with garbage
        self._num_bytes = 0
        num_bytes = storage.nbytes()
        with self._streams.lock:
            if Present.used_bytes + num_bytes > Present.total_bytes:
                raise torch.OutOfMemoryError(f"the emulated device has no {num_bytes} bytes")
            self._num_bytes = num_bytes
            Present.take(num_bytes)

    def __del__(self) -> None:
        streams = self._streams
        with streams.lock:
            if streams is Present.streams:
                Present.used_bytes -= self._num_bytes
            for stream, number in self.users():
                if not self.owner.is_behind(stream, number):
                    streams.found(f"memory of {self.owner.name} is freed while {stream.name} may be using it")
        if not self.lasting:
            self.storage.fill_(GARBAGE)  # type: ignore[attr-defined]


class OnDevice(Tensor):
    held: Tensor
    memory: Memory

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor, memory: Memory) -> OnDevice:
        # A view of a tensor from outside of inference mode must be one itself; so all are.
        with torch.inference_mode(mode=False):
            made: OnDevice = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                held.shape,
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=DEVICE,
            )
        made.held, made.memory = held, memory
        return made

    def __init__(self, held: Tensor, memory: Memory) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return run(op, args, kwargs or {})

    is_cuda = True  # type: ignore[assignment]

    def data_ptr(self) -> int:
        stream = Present.streams.current
        self.memory.touch(stream, stream.issue(), write=False)
        if stream.trace is not None:
            stream.trace.uses_address(self)
        return self.held.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        Present.streams.found("numpy of a device's tensor")
        raise TypeError("can't convert a tensor of an emulated device to numpy; copy it to the host first")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnDevice({list(self.shape)}, {self.dtype})"


def new(held: Tensor, *, lasting: bool = False) -> OnDevice:
    """A host tensor that nobody else has, as one of the device."""
    memory = Memory(held.untyped_storage(), lasting=lasting)
    if (trace := Present.streams.current.trace) is not None:
        trace.makes(memory)
    return OnDevice(held, memory)


def pinned(host: Tensor) -> Tensor:
    host.untyped_storage().emulated_pin = True  # type: ignore[attr-defined]
    return host


def is_pinned(host: Tensor) -> bool:
    return hasattr(host.untyped_storage(), "emulated_pin")


# ---- the rules

_NEW = ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided")
_CROSSING = ("aten::copy_", "aten::_to_copy", "aten::set_")
# Host tensors of these take part as indices: CUDA copies them to the device and waits.
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index")
_DRAWING = ("aten::normal_", "aten::uniform_", "aten::random_", "aten::randperm", "aten::exponential_")
_WAITING = {
    "aten::_local_scalar_dense": "a number",
    "aten::nonzero": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::unique_dim": "unique",
    "aten::_unique2": "unique",
    "aten::unique_consecutive": "unique",
    "aten::bincount": "bincount",
    "aten::equal": "equal",
    "aten::is_nonzero": "a truth value",
}


@cache
def writes_of(op: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Arguments that an op writes, by place and by name."""
    arguments = op._schema.arguments
    written = [(i, a) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    return frozenset(i for i, _ in written), frozenset(a.name for _, a in written)


def flat(values: Any) -> list[Any]:
    if isinstance(values, (list, tuple)):
        return [found for value in values for found in flat(value)]
    return [values]


def held_by(value: Any) -> Any:
    if isinstance(value, OnDevice):
        return value.held
    if isinstance(value, (list, tuple)):
        found = [held_by(one) for one in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return value


@cache
def is_composite(op: Any) -> bool:
    """An op that is made of others; torch takes it apart by itself outside of inference mode alone."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))


def run(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Torch calls this for every op with a tensor of the device, or that makes one."""
    if is_composite(op):
        return op.decompose(*args, **kwargs)
    name = op._schema.name
    given = [value for value in flat((*args, *kwargs.values())) if isinstance(value, Tensor)]
    hosts = [value for value in given if not isinstance(value, OnDevice)]
    if name in _CROSSING:
        return _cross(op, args, kwargs, hosts)
    if hosts:
        _check_hosts(name, args, hosts)
    if name in _DRAWING:
        Present.streams.check_draw()
    _check_waits(name, op, args, kwargs)
    return _compute(op, args, kwargs)


def _check_hosts(name: str, args: Sequence[Any], hosts: list[Tensor]) -> None:
    streams = Present.streams
    if name in _INDEXED:
        indices = [value for value in flat(args[1]) if isinstance(value, Tensor)]
        if any(host is index for host in hosts for index in indices):
            streams.waits("an index that lies on the host")
            hosts = [host for host in hosts if not any(host is index for index in indices)]
    if any(host.dim() for host in hosts):
        streams.found(f"{name}: tensors of the host and of the device")
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found two, {DEVICE} and cpu")


def _check_waits(name: str, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if name in _WAITING:
        Present.streams.waits(_WAITING[name])
    elif name == "aten::repeat_interleave" and "output_size" in [a.name for a in op._schema.arguments]:
        if kwargs.get("output_size") is None:
            Present.streams.waits("repeat_interleave without output_size")
    elif name in _INDEXED and any(
        isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in flat(args[1])
    ):
        Present.streams.waits("a mask as an index")


def _cross(op: Any, args: Sequence[Any], kwargs: dict[str, Any], hosts: list[Tensor]) -> Any:
    if op._schema.name == "aten::copy_":
        target, source = args[0], args[1]
        asynchronous = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if isinstance(target, OnDevice) and not isinstance(source, OnDevice):
            _send(source, asynchronous=asynchronous)
        elif not isinstance(target, OnDevice):
            return _fetch(target, source, asynchronous=asynchronous)
        return _compute(op, args, kwargs)
    assert op._schema.name == "aten::_to_copy", op
    device = kwargs.get("device")
    here = device is not None and device.type == "cpu"
    if here and isinstance(args[0], OnDevice):
        target = torch.empty_like(args[0].held, dtype=kwargs.get("dtype") or args[0].dtype)
        return _fetch(target, args[0], asynchronous=False)
    if hosts:
        _send(hosts[0], asynchronous=bool(kwargs.get("non_blocking", False)))
    return _compute(op, args, kwargs)


def _send(source: Tensor, *, asynchronous: bool) -> None:
    streams = Present.streams
    if not asynchronous:
        streams.waits("a copy from the host")
        return
    if streams.current.trace is not None:
        streams.waits("a copy from the host")
    if is_pinned(source):
        before = source.clone()

        def check() -> None:
            if not torch.equal(before.view(torch.uint8), source.view(torch.uint8)):
                streams.found("pinned memory was changed before it was copied")

        streams.current.issue(check)


def _fetch(target: Tensor, source: OnDevice, *, asynchronous: bool) -> Tensor:
    streams, stream = Present.streams, Present.streams.current
    found = source.held.clone()
    source.memory.touch(stream, stream.issue(), write=False)
    if asynchronous and is_pinned(target):
        target.view(torch.uint8).fill_(GARBAGE)
        stream.issue(partial(_arrive, target, found))
        streams.launch(work_of_op("", [source], [target]))
    else:
        streams.waits("a copy to the host")
        target.copy_(found)
    return target


def _arrive(target: Tensor, found: Tensor) -> None:
    target.copy_(found)


def _compute(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    streams = Present.streams
    plain_args = tuple(map(held_by, args))
    plain = {key: held_by(value) for key, value in kwargs.items() if key != "pin_memory"}
    if plain.get("device") is not None:
        plain["device"] = torch.device("cpu")
    compute = _OF_DEVICES.get(op, op)
    with streams.lock:
        result = compute(*plain_args, **plain)
        if op._schema.name in _NEW:
            spoil(result)
        number = streams.current.issue()
        places, names = writes_of(op)
        written = [args[i] for i in places if i < len(args)] + [kwargs[name] for name in names if name in kwargs]
        if not op.is_view:
            touch(flat((*args, *kwargs.values())), flat(written), number)
        wrapped = _wrapped(result, flat((*args, *kwargs.values())))
    if not op.is_view and op._schema.name not in _NEW:
        streams.launch(work_of_op(op._schema.name, flat((*args, *kwargs.values())), flat(wrapped)))
    trace = streams.current.trace
    if trace is not None and not op.is_view and op._schema.name not in _NEW:
        trace.add(compute, plain_args, plain, [] if written else [out.held for out in flat(wrapped) if out is not None])
    return wrapped


def _mm(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.mm(left.float(), right.float()).to(out_dtype)


def _histc(numbers: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.histc(numbers.float(), *args, **kwargs).to(numbers.dtype)


# Ops that no processor has, or not for these types.
_OF_DEVICES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.mm.dtype: _mm,
    torch.ops.aten._scaled_mm.default: scaled_mm,
    torch.ops.aten.histc.default: _histc,
}


def spoil(host: Tensor) -> None:
    """Fills memory that nobody has written."""
    if host.dtype.is_floating_point:
        host.fill_(float("nan"))
    else:
        host.untyped_storage().fill_(0x01 if host.dtype is torch.bool else GARBAGE)


def touch(given: Sequence[Any], written: Sequence[Any], number: int) -> None:
    stream = Present.streams.current
    changed = {id(value.memory): value.memory for value in written if isinstance(value, OnDevice)}
    others = {id(value.memory): value.memory for value in given if isinstance(value, OnDevice)}
    for key, memory in others.items():
        if key not in changed:
            memory.touch(stream, number, write=False)
    for memory in changed.values():
        memory.touch(stream, number, write=True)
    if stream.trace is not None:
        stream.trace.touches(others.values(), changed.values())


def _wrapped(result: Any, given: Sequence[Any]) -> Any:
    known = {id(value.held): value for value in given if isinstance(value, OnDevice)}
    memories = {_address(value.held): value.memory for value in given if isinstance(value, OnDevice)}
    return _wrap(result, known, memories)


def _wrap(value: Any, known: dict[int, OnDevice], memories: dict[int, Memory]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_wrap(one, known, memories) for one in value)
    if not isinstance(value, Tensor):
        return value
    if (same := known.get(id(value))) is not None:
        assert same.shape == value.shape, "a tensor of the emulated device was resized"
        return same
    memory = memories.get(_address(value)) if value.untyped_storage().nbytes() else None
    if memory is not None:
        return OnDevice(value, memory)
    made = new(value)
    made.memory.touch(Present.streams.current, Present.streams.current.issued, write=True)
    memories[_address(value)] = made.memory
    return made


def _address(host: Tensor) -> int:
    return host.untyped_storage().data_ptr()


def _arange(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: run(op, args, kwargs)


_LIBRARY = torch.library.Library("_", "IMPL")
_LIBRARY.fallback(lambda op, *args, **kwargs: run(op, args, kwargs), "PrivateUse1")
# By itself torch makes an empty tensor and lets the op resize it, which a wrapper cannot follow.
_ATEN = torch.library.Library("aten", "IMPL")
for _op in (torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step):
    _ATEN.impl(_op, _arange(_op), "PrivateUse1")

"""The choice of the backend: what "auto" takes, what is refused by name, and what it says when something is missing."""

import logging
import os
import re
import subprocess
import sys

import pytest
import torch

from hydra_engine import _C
from hydra_engine.backend import devices
from hydra_engine.backend.reference.ops import ALL_OPS
from hydra_engine.backend.select import (
    DTYPES,
    all_cores,
    create_backend,
    describe_cpu,
    resolve_deterministic,
    resolve_device,
    resolve_dtype,
    weights_dtype,
)
from hydra_engine.errors import BackendError, ConfigError
from tests.ops.conftest import LEVELS


@pytest.fixture
def without_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a machine where nothing was built: None in sys.modules makes an import fail."""
    monkeypatch.setitem(sys.modules, "hydra_engine._C", None)


@pytest.fixture(autouse=True)
def restored_threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    _C.set_num_threads(1)


def test_auto_takes_the_native_extension() -> None:
    backend = create_backend("auto", torch.bfloat16, threads=1)
    assert (backend.ops.name, backend.ops.deterministic) == ("native", True)
    assert (backend.device.name, backend.dtype, backend.threads) == ("cpu", torch.bfloat16, 1)
    choices = backend.ops.choices()
    assert tuple(choice.op for choice in choices) == ALL_OPS
    assert all(choice.implementation.startswith("native") and choice.reason for choice in choices)


def test_the_table_follows_the_level(isa: str) -> None:
    linear = next(choice for choice in create_backend("cpu", torch.float32).ops.choices() if choice.op == "linear")
    assert linear.implementation == f"native-{isa}"


def test_threads_are_set_for_the_calling_thread_and_default_to_all_cores() -> None:
    assert create_backend("cpu", torch.float32, threads=2).threads == 2
    assert (torch.get_num_threads(), _C.num_threads()) == (2, 2)
    assert create_backend("cpu", torch.float32).threads >= 1


def test_start_up_work_takes_all_cores_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    few, many = create_backend("cpu", torch.float32, threads=1), create_backend("cpu", torch.float32, threads=4)
    for backend, count in ((few, 3), (many, 4)):
        with all_cores(backend):
            assert (torch.get_num_threads(), _C.num_threads()) == (count, count)
        assert (torch.get_num_threads(), _C.num_threads()) == (backend.threads, backend.threads)


def test_auto_without_the_extension_says_what_is_missing_and_how_to_build_it(
    without_extension: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="hydra_engine.backend.select"):
        backend = create_backend("auto", torch.float32)
    assert backend.ops.name == "reference"
    for words in ("hydra_engine._C is not built", "make build", "reference"):
        assert words in caplog.text
    assert "make build" in backend.ops.choices()[0].reason


def test_native_by_name_without_the_extension_is_refused(without_extension: None) -> None:
    with pytest.raises(BackendError, match=r"not built.*make build"):
        create_backend("cpu", torch.float32, backend="native")


def test_a_broken_extension_is_told_from_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> object:
        raise ImportError("undefined symbol: oops")

    monkeypatch.setattr("hydra_engine.backend.select.importlib.import_module", fail)
    with pytest.raises(BackendError, match=r"does not load .undefined symbol"):
        create_backend("cpu", torch.float32, backend="native")


def test_the_reference_is_taken_by_name() -> None:
    assert create_backend("cpu", torch.float32, backend="reference").ops.name == "reference"


@pytest.mark.skipif(devices.probe().status == "ok", reason="this machine has a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_gpu_by_name_is_refused_with_the_reason(device: str) -> None:
    with pytest.raises(BackendError, match=f"device cuda:0 cannot be used: {re.escape(devices.probe().problem)}"):
        create_backend(device, torch.float32)
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("name", ["native", "reference"])
def test_an_implementation_by_name_is_one_of_the_processor(name: str) -> None:
    assert resolve_device("auto", name).name == "cpu"
    with pytest.raises(ConfigError, match=f"backend {name} runs on a processor; set backend to auto or device to cpu"):
        resolve_device("cuda:0", name)


def test_batch_invariance_is_the_default_where_it_costs_nothing() -> None:
    assert resolve_deterministic(None, "cpu") == (True, None)
    wanted, note = resolve_deterministic(None, "cuda:1")
    assert not wanted and note is not None and "--deterministic" in note
    for given in (False, True):
        assert resolve_deterministic(given, "cuda:0") == resolve_deterministic(given, "cpu") == (given, None)


def test_the_dtype_on_a_gpu_is_the_checkpoint_s() -> None:
    for stored in ("float32", "bfloat16", "float16"):
        dtype, reason = resolve_dtype("auto", stored, "auto", "cuda:0")
        assert str(dtype) == f"torch.{stored}" and stored in reason
    assert resolve_dtype("auto", "float64", "auto", "cuda:0")[0] == torch.float32
    assert resolve_dtype("float16", "bfloat16", "auto", "cuda:0") == (torch.float16, "dtype float16: as asked")


def test_unknown_names_are_configuration_errors() -> None:
    with pytest.raises(ConfigError, match="device must be"):
        create_backend("tpu", torch.float32)
    with pytest.raises(ConfigError, match="backend must be"):
        create_backend("cpu", torch.float32, backend="fast")
    with pytest.raises(ConfigError, match="dtype must be"):
        resolve_dtype("int8", "bfloat16")


def test_the_dtype_follows_checkpoint_and_processor(isa: str) -> None:
    expected = torch.bfloat16 if isa in ("amx", "avx512bf16") else torch.float32
    for stored in ("bfloat16", "float16"):
        dtype, reason = resolve_dtype("auto", stored)
        assert dtype == expected and str(dtype).removeprefix("torch.") in reason
    assert resolve_dtype("auto", "float32")[0] == torch.float32
    assert resolve_dtype("auto", "bfloat16", "reference")[0] == torch.float32
    assert resolve_dtype("float16", "bfloat16") == (torch.float16, "dtype float16: as asked")


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_matrices_beside_float32_rows_stay_in_16_bits_where_native_products_read_them(stored: str) -> None:
    said = f"dtype float32: as asked; matrices stay {stored}"
    assert resolve_dtype("float32", stored) == resolve_dtype("float32", stored, "native") == (torch.float32, said)
    assert weights_dtype(torch.float32, stored) is DTYPES[stored]
    assert weights_dtype(torch.bfloat16, stored) is torch.bfloat16
    for backend, device in (("reference", "cpu"), ("auto", "cuda:0")):
        assert weights_dtype(torch.float32, stored, backend, device) is torch.float32
        assert "stay" not in resolve_dtype("float32", stored, backend, device)[1]
    assert weights_dtype(torch.float32, "float32") is weights_dtype(torch.float32, "float64") is torch.float32


def test_the_dtype_without_the_extension_is_float32(without_extension: None) -> None:
    dtype, reason = resolve_dtype("auto", "bfloat16")
    assert dtype == torch.float32 and "not built" in reason and "stay" not in reason


def test_memory_is_what_the_machine_has() -> None:
    free, total = create_backend("cpu", torch.float32).device.memory()
    assert 0 < free <= total


def test_doctor_learns_level_features_and_where_the_extension_is() -> None:
    found = describe_cpu()
    assert found["isa"] == _C.isa() and found["extension"] == _C.__file__ and found["extension_problem"] is None
    assert found["cores"] >= 1 and isinstance(found["features"], list)


def test_a_variable_lowers_the_level_and_never_raises_it() -> None:
    best = level_under("")
    assert [level_under(level) for level in ("scalar", "amx")] == ["scalar", best]
    assert level_under("avx2") == min("avx2", best, key=LEVELS.index)
    wrong = "HYDRA_MAX_CPU_ISA: expected scalar, avx2, avx512, avx512bf16 or amx, got 'sse'"
    assert level_under("sse") == wrong


def level_under(variable: str) -> str:
    """The level that an engine takes under HYDRA_MAX_CPU_ISA, or why it takes none."""
    code = (
        "from hydra_engine.backend.devices import load_extension\n"
        "from hydra_engine.errors import ConfigError\n"
        "try: print(load_extension()[0].isa())\n"
        "except ConfigError as error: print(error)"
    )
    environment = {**os.environ, "HYDRA_MAX_CPU_ISA": variable}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_doctor_without_the_extension(without_extension: None) -> None:
    found = describe_cpu()
    assert (found["extension"], found["isa"], found["features"]) == (None, None, [])
    assert "not built" in found["extension_problem"]

"""Choice of the device, from what the driver, the extension, torch and Triton say: every answer is data."""

from dataclasses import replace

import pytest
import torch

from hydra_engine.backend import devices
from hydra_engine.backend.devices import CudaDeviceInfo, CudaProbe, CudaSupport, choose_device, refusal
from hydra_engine.core.instances import Role
from hydra_engine.errors import BackendError, ConfigError
from hydra_engine.instance import compute_stack
from hydra_engine.instance.ports import InstanceContext

CODES = ("sm_80", "sm_90", "compute_90")
H200 = CudaDeviceInfo(0, "NVIDIA H200", (9, 0), 132, 150 << 30, usable=True)
V100 = CudaDeviceInfo(1, "Tesla V100", (7, 0), 80, 16 << 30, usable=False)
OK = CudaProbe("ok", "", CODES, 13000, 13000, (H200, V100))
NO_DRIVER = CudaProbe("no_driver", "no NVIDIA driver is installed: libcuda.so.1 cannot be loaded", CODES, 13000, 0, ())
OLD_DRIVER = replace(
    NO_DRIVER,
    status="driver_too_old",
    problem="the NVIDIA driver runs CUDA up to 12.2, the extension was built with 13.0: update the driver or build "
    "with an older toolkit",
    driver_version=12020,
)
NO_DEVICE = replace(
    NO_DRIVER,
    status="no_device",
    problem="the NVIDIA driver shows no device; see CUDA_VISIBLE_DEVICES",
    driver_version=13000,
)
NO_CODE = CudaProbe(
    "no_code",
    "no device can run the extension, which was built for sm_80: build it again with HYDRA_CUDA_ARCHS",
    ("sm_80",),
    13000,
    13000,
    (replace(V100, index=0),),
)
NO_EXTENSION = CudaProbe("no_extension", "the native extension hydra_engine._C is not built", (), 0, 0, ())
NOT_BUILT = CudaProbe("not_built", "the extension was built without CUDA", (), 0, 0, ())
ERROR = replace(NO_DRIVER, status="error", problem="the NVIDIA driver does not start: unknown error")
NO_TORCH = "torch 2.13.0+cpu was built without CUDA; install a build with it"
NO_TRITON = "triton cannot be imported (No module named 'triton'); pip install triton"

# What was found, what cuda:0 is refused with, whether a line of the log at the usual level says so.
REFUSALS = [
    pytest.param(CudaSupport(NO_EXTENSION), "is not built", False, id="nothing"),
    pytest.param(CudaSupport(NOT_BUILT), "built without CUDA", False, id="not_built"),
    pytest.param(CudaSupport(NO_DRIVER), "no NVIDIA driver is installed", False, id="no_driver"),
    pytest.param(CudaSupport(OLD_DRIVER), "runs CUDA up to 12.2.*update the driver", True, id="driver_too_old"),
    pytest.param(CudaSupport(NO_DEVICE), "shows no device; see CUDA_VISIBLE_DEVICES", False, id="no_device"),
    pytest.param(CudaSupport(NO_CODE), "built for sm_80: build it again with HYDRA_CUDA_ARCHS", True, id="no_code"),
    pytest.param(CudaSupport(ERROR), "does not start", True, id="error"),
    pytest.param(CudaSupport(OK, NO_TORCH, NO_TRITON), "torch .*was built without CUDA", True, id="torch"),
    pytest.param(CudaSupport(OK, "", NO_TRITON), r"triton cannot be imported.*; pip install triton", True, id="triton"),
]


@pytest.mark.parametrize(("found", "why", "loud"), REFUSALS)
def test_a_gpu_that_cannot_be_used_is_refused_by_name_and_left_out_by_auto(
    found: CudaSupport, why: str, loud: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(BackendError, match=f"^device cuda:0 cannot be used: .*{why}"):
        choose_device("cuda:0", found)
    monkeypatch.setattr(devices, "cuda_support", lambda: found)
    with caplog.at_level("INFO", logger="hydra_engine.backend.devices"):
        chosen = devices.resolve("auto")
    assert (chosen.name, chosen.index) == ("cpu", None)
    (line,) = (record for record in caplog.records if record.name == devices.__name__)
    assert line.message == f"device cpu is taken: {chosen.reason}" and chosen.reason == refusal(found, 0)
    assert (line.levelname == "WARNING") == loud


def test_a_gpu_that_can_be_used_is_taken_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "cuda_support", lambda: CudaSupport(OK))
    with caplog.at_level("INFO", logger="hydra_engine.backend.devices"):
        taken = [devices.resolve(name) for name in ("auto", "cuda", "cuda:0")]
    assert [(chosen.name, chosen.index, chosen.num_sms) for chosen in taken] == [("cuda:0", 0, 132)] * 3
    assert not caplog.records


def test_each_gpu_is_looked_at_by_itself() -> None:
    with pytest.raises(
        BackendError, match=r"Tesla V100 has compute capability 7\.0 .*sm_80 sm_90 compute_90: build it"
    ):
        choose_device("cuda:1", CudaSupport(OK))
    with pytest.raises(BackendError, match=r"cuda:2 .*there are 2 GPUs, numbered from 0 \(CUDA_VISIBLE_DEVICES"):
        choose_device("cuda:2", CudaSupport(OK))
    with pytest.raises(BackendError, match="there is 1 GPU, numbered from 0"):
        choose_device("cuda:1", CudaSupport(NO_CODE))


@pytest.mark.parametrize("word", ["tpu", "cuda:", "cuda:01", "cuda:-1", "cuda:1000", "CUDA:0", "cpu:0", ""])
def test_other_words_are_configuration_errors(word: str) -> None:
    with pytest.raises(ConfigError, match="device must be auto, cpu or cuda:N"):
        choose_device(word, CudaSupport(OK))


def test_names_are_those_of_the_driver_even_where_torch_cannot_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "probe", lambda: OK)
    assert devices.names() == ("cpu", "cuda:0", "cuda:1")
    monkeypatch.setattr(devices, "probe", lambda: NO_DRIVER)
    assert devices.names() == ("cpu",)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_with_a_driver_and_without_torch_s_cuda_torch_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe alone is replaced here."""
    monkeypatch.setattr(devices, "probe", lambda: OK)
    with pytest.raises(BackendError, match=r"cuda:0 cannot be used: torch .* was built without CUDA"):
        devices.resolve("cuda:0")
    assert devices.resolve("auto").name == "cpu" and not torch.cuda.is_initialized()


def test_a_missing_extension_leaves_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "hydra_engine._C", None)
    assert devices.names() == ("cpu",)
    assert "not built" in devices.resolve("auto").reason


def test_instances_that_share_a_gpu_take_turns_unless_mps_runs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(OK, devices=(H200, replace(H200, index=1, has_mps=True)))
    monkeypatch.setattr(devices, "probe", lambda: found)
    assert [devices.is_time_sliced(name) for name in ("cuda:0", "cuda:1", "cuda", "cpu")] == [True, False, True, False]
    for name, neighbours, said in (
        ("cuda:0", (Role.E, Role.P), "the 2 instances on cuda:0 take turns"),
        ("cuda:0", (Role.E,), ""),
        ("cuda:1", (Role.E, Role.P), ""),
        ("cpu", (Role.E, Role.P), ""),
    ):
        chosen = devices.ChosenDevice(name, None if name == "cpu" else int(name[-1]), 132, "as asked")
        note = compute_stack._turns(chosen, InstanceContext(Role.E, neighbours=neighbours)) or ""
        assert said in note and bool(said) == bool(note)

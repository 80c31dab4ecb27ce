"""The compiled extension: which devices it has code for, how its copies access memory, that it loads and answers
without a driver and without CUDA at all. Skipped, with the reason, where nothing was compiled for a device."""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from bootstrap import has_driver
from hydra_engine import _C

ROOT = Path(__file__).parents[2]
OBJECTS = ROOT / "build" / "native"
CODES = _C.cuda_probe()["codes"]
CUBINS = [code for code in CODES if code.startswith("sm_")]
LIBRARY = str(_C.__file__)

needs_cuda = pytest.mark.skipif(not CODES, reason="the extension was built without CUDA")


@cache
def cuobjdump() -> str:
    """The toolkit's, or the one that triton brings along."""
    folders = [os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin"]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.submodule_search_locations:
        folders.append(f"{triton.submodule_search_locations[0]}/backends/nvidia/bin")
    found = shutil.which("cuobjdump") or next(filter(None, (shutil.which(f"{f}/cuobjdump") for f in folders)), None)
    if found is None:
        pytest.skip("no cuobjdump found")
    return found


@cache
def machine_code(arch: str) -> dict[str, list[str]]:
    """Kernel (mangled name) -> its memory instructions on `arch`."""
    text = subprocess.check_output([cuobjdump(), "-sass", "-arch", arch, LIBRARY], text=True)
    kernels: dict[str, list[str]] = {}
    for part in text.split("Function : ")[1:]:
        name, _, body = part.partition("\n")
        kernels[name.strip()] = re.findall(r"\b((?:LDG|STG|LDL|STL)[.\w]*)", body)
    return kernels


@needs_cuda
def test_the_library_holds_what_the_probe_says() -> None:
    elfs = subprocess.check_output([cuobjdump(), "-lelf", LIBRARY], text=True)
    ptx = subprocess.check_output([cuobjdump(), "-lptx", LIBRARY], text=True)
    held = {f"sm_{number}" for number in re.findall(r"\.sm_(\d+[af]?)\.cubin", elfs)}
    held |= {f"compute_{number}" for number in re.findall(r"\.sm_(\d+[af]?)\.ptx", ptx)}
    assert held == set(CODES)


@pytest.mark.skipif("HYDRA_CUDA_ARCHS" in os.environ or not CODES, reason="not built for the usual devices")
def test_the_usual_devices_are_built_for() -> None:
    assert CODES == ["sm_80", "sm_90", "compute_90"]


@needs_cuda
@pytest.mark.parametrize("arch", CUBINS)
@pytest.mark.parametrize(
    ("kernel", "loads", "stores"),
    [
        ("move_rowsI5uint4Lb0E", 4, 4),
        ("move_rowsI5uint4Lb1E", 4, 4),
        ("copy_pairsI5uint4Li500E", 4, 4),
        ("copy_pairsI5uint4Li4000E", 4, 4),
        ("add_rowsIfLi4E", 8, 4),
        ("add_rowsI6__halfLi8E", 8, 4),
        ("add_rowsI13__nv_bfloat16Li8E", 8, 4),
        ("rope_headsIfLi4E", 8, 2),
        ("rope_headsI6__halfLi8E", 10, 2),
        ("rope_headsI13__nv_bfloat16Li8E", 10, 2),
    ],
)
@pytest.mark.slow
def test_wide_kernels_move_16_bytes_at_once(arch: str, kernel: str, loads: int, stores: int) -> None:
    (accesses,) = [found for name, found in machine_code(arch).items() if kernel in name]
    wide_loads = [a for a in accesses if a.startswith("LDG") and ".128" in a]
    wide_stores = [a for a in accesses if a.startswith("STG") and ".128" in a]
    assert len(wide_loads) >= loads and len(wide_stores) >= stores, accesses
    # The rest are slots and rows (8 bytes each) and the fault word; nothing of the data goes in smaller pieces.
    rest = [a for a in accesses if a not in (*wide_loads, *wide_stores)]
    assert all(".64" in a for a in rest), rest


@pytest.mark.slow
@needs_cuda
@pytest.mark.parametrize("arch", CUBINS)
def test_copies_have_all_their_loads_in_flight_before_the_first_store(arch: str) -> None:
    for kernel in ("move_rowsI5uint4Lb1E", "copy_pairsI5uint4Li500E"):
        (accesses,) = [found for name, found in machine_code(arch).items() if kernel in name]
        wide = [a[:3] for a in accesses if ".128" in a]
        assert wide[:4] == ["LDG"] * 4 and "LDG" not in wide[4:], wide


@needs_cuda
def test_no_kernel_spills() -> None:
    reports = list(OBJECTS.glob(f"{'-'.join(CODES)}/csrc/cuda/*.ptxas"))
    if not reports:
        pytest.skip("the compiler's reports are not here: the extension was built elsewhere")
    text = "".join(path.read_text() for path in reports)
    kernels = re.findall(r"Compiling entry function '(\w+)' for 'sm_\w+'", text)
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    assert len(kernels) == len(spills) == 24 * len(CUBINS)
    assert set(spills) == {("0", "0", "0")}


def test_the_library_needs_no_cuda_library() -> None:
    needed = subprocess.check_output(["ldd", LIBRARY], text=True)
    assert "cuda" not in needed and "torch" not in needed


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_module_loads_no_driver() -> None:
    """The claim is not about torch: its own libraries may load one."""
    maps = run_python("import hydra_engine._C\nprint(open('/proc/self/maps').read())")
    assert "_C." in maps and "libcuda.so" not in maps


@needs_cuda
@pytest.mark.skipif(has_driver(), reason="a driver is installed")
def test_without_a_driver_the_probe_and_every_call_say_so() -> None:
    from hydra_engine.backend import devices
    from hydra_engine.backend.cuda import shared_memory as cuda_memory

    found = devices.probe()
    assert found.status == "no_driver" and "libcuda.so.1" in found.problem
    assert found.runtime_version >= 12050 and found.devices == ()
    unit = _C.CUDA_POOL_GRANULARITY
    calls = [
        lambda: _C.CudaCacheDesc(16, 2, 1, 2, 4, 1, 8, 0, 0),
        lambda: _C.cuda_allocate(unit, 0),
        lambda: _C.cuda_ipc_open(bytes(64), unit, 0),
        lambda: _C.cuda_check_faults(0),
        lambda: cuda_memory.DevicePool(1, 0),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"CUDA cannot be used: no NVIDIA driver .*libcuda\.so\.1"):
            call()


def test_arguments_are_checked_before_the_device_is_asked() -> None:
    with pytest.raises(ValueError, match="1 or 2 tensors"):
        _C.CudaCacheDesc(16, 2, 1, 3, 4, 1, 8, 0, 0)
    with pytest.raises(ValueError, match=r"2\^31 slots"):
        _C.CudaCacheDesc(16, 1 << 28, 1, 2, 16, 1, 8, 0, 0)
    values = (ctypes.c_int64 * 3)(0, -1, 7)
    _C.check_range("slots", ctypes.addressof(values), 3, -1, 8)
    with pytest.raises(ValueError, match="slots: expected 0 to 7, got -1 at index 1"):
        _C.check_range("slots", ctypes.addressof(values), 3, 0, 8)


# Compiles one file and links; a machine without the other objects would compile them all.
@pytest.mark.slow
@pytest.mark.skipif(not OBJECTS.exists(), reason="the extension was built elsewhere")
def test_a_build_without_cuda_imports_and_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "HYDRA_CPU_ONLY": "1"}
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=240)
    (library,) = tmp_path.glob("hydra_engine/_C*.so")
    out = run_python(
        "import importlib.util as u\n"
        f"spec = u.spec_from_file_location('hydra_engine._C', {str(library)!r})\n"
        "m = u.module_from_spec(spec); spec.loader.exec_module(m)\n"
        "print(m.cuda_probe())\n"
        "for call in (lambda: m.CudaCacheDesc(16, 2, 1, 2, 4, 1, 8, 0, 0), lambda: m.cuda_allocate(1, 0)):\n"
        "    try: call()\n"
        "    except RuntimeError as error: print(error)\n"
    )
    assert "'status': 'not_built'" in out and "'codes': []" in out
    assert out.count("built without CUDA") == 3

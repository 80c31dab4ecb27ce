"""The kernels of csrc/cuda executed on the host: translated, compiled under AddressSanitizer and
UndefinedBehaviorSanitizer, and run in a process of their own on the cases of tests/native/host_cuda. Skipped, with the
reason, where no compiler can do that."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.native.host_cuda import build
from tests.native.host_cuda.conftest import MODULE_VARIABLE

# In this order: the first begins where no device was used yet.
CASES = ("cases_device.py", "cases_rules.py", "cases_cache.py", "cases_split.py")


# The first time compiles for some twenty seconds of processor time.
@pytest.mark.slow  # compiles all kernels and runs all cases: a third of a minute of a core
def test_every_case_passes_under_the_sanitizers() -> None:
    cxx = build.compiler()
    if cxx is None:
        pytest.skip("no C++ compiler found")
    preloads = build.preloads(cxx)
    if preloads is None:
        pytest.skip(f"{cxx} has no libasan.so to load before Python")
    environment = {
        **os.environ,
        MODULE_VARIABLE: str(build.build(cxx)),
        "LD_PRELOAD": preloads,
        # Python and torch keep what they have until the end; a CUDA driver that torch may load wants its gap.
        "ASAN_OPTIONS": "detect_leaks=0:protect_shadow_gap=0",
        "OMP_NUM_THREADS": "1",
    }
    # What a sanitizer says goes past the capture: the process is over by then, and so are the plugin's own handlers.
    plugins = ["--capture=sys", "-p", "no:faulthandler", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", *plugins, *(str(build.HERE / name) for name in CASES)],
        cwd=build.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    summary = done.stdout.rstrip().rpartition("\n")[2]
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
    assert " passed" in summary and "skipped" not in summary, summary


# ---- the translation


KERNEL = """__global__ void __launch_bounds__(kThreads) twice(const __grid_constant__ Call<4> call) {
  use(call);
}
"""


def test_kernels_and_launches_become_calls() -> None:
    launch = "  twice<<<dim3(1, 2), kThreads, 0, stream_of(target)>>>(call);\n"
    assert build.translated(KERNEL + launch, "a.cu") == (
        '#line 1 "a.cu"\n__global__ void twice(const Call<4>& call) {\n  use(call);\n}\n'
        '  ::host_cuda::launch({"twice", kThreads, dim3(1, 2), kThreads, 0, stream_of(target)}, &twice, call);\n'
    )
    generic = KERNEL.replace("twice", "more") + "more<T, 4><<<1, 32, 0, nullptr>>>(call);"
    assert '{"more<T, 4>", kThreads, 1, 32, 0, nullptr}, &more<T, 4>, call)' in build.translated(generic, "a.cu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (KERNEL.replace("const __grid_constant__ ", ""), "twice: expected `const __grid_constant__ T name`"),
        (KERNEL + "twice<<<1, 32>>>(call);", "expected kernel<<<grid, block, shared, stream>>>"),
        (KERNEL + "other<<<1, 32, 0, 0>>>(call);", "expected kernel<<<grid, block, shared, stream>>>"),
        (KERNEL + "\n(*which)<<<1, 32, 0, 0>>>(call);", "a.cu:5: <<< in a form"),
        (KERNEL + "twice<<<1, 32, 0, 0>>>\n(call);", "a.cu:4: <<< in a form"),
        (KERNEL.replace("__launch_bounds__(kThreads) ", ""), "a.cu:1: __grid_constant__ in a form"),
        ("__global__ void twice(Call call);", "a kernel is declared in a form"),
    ],
)
def test_what_the_translation_does_not_know_is_an_error(text: str, message: str) -> None:
    with pytest.raises(build.TranslationError) as raised:
        build.translated(text, "a.cu")
    assert message in str(raised.value)

"""Cases of the CUDA ops that run on a device (tests/gpu) and, with Triton's interpreter, on the host
(tests/kernels/interpreted): what is chosen, split, padded and cached around the kernels, against the reference.

Kernels have their own cases in tests/kernels, so shapes are few and small here. Every input is a view of a wider buffer
whose other columns are NaN.
"""

from tests.gpu.op_cases import attention, products, rows

TESTS = {
    name: case
    for module in (products, rows, attention)
    for name, case in vars(module).items()
    if name.startswith("test_")
}

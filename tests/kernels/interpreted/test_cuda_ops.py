"""The CUDA ops around their kernels, on the host: every case of tests/gpu/op_cases.py."""

from collections.abc import Iterator

import pytest
import torch

from tests.gpu import op_cases as cases
from tests.gpu.side import Side, interpreted
from tests.kernels.scaled_mm import scaled_mm

for _name, _case in vars(cases).items():
    if _name.startswith("test_"):
        globals()[_name] = _case


@pytest.fixture(scope="module")  # the process in which nothing is interpreted runs other tests afterwards
def side() -> Iterator[Side]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", scaled_mm)
        yield interpreted()

"""The CUDA ops around their kernels, on the host: every case of tests/gpu/op_cases."""

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.op_cases import TESTS
from tests.gpu.side import Side, interpreted
from tests.kernels.scaled_mm import scaled_mm

globals().update(TESTS)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")  # the process in which nothing is interpreted runs other tests afterwards
def side() -> Iterator[Side]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", scaled_mm)
        yield interpreted()

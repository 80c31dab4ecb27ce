"""The CUDA ops around their kernels, on the host: every case of tests/gpu/op_cases.py."""

import pytest

from tests.gpu import op_cases as cases
from tests.gpu.side import Side, interpreted

for _name, _case in vars(cases).items():
    if _name.startswith("test_"):
        globals()[_name] = _case


@pytest.fixture(scope="session")
def side() -> Side:
    return interpreted()

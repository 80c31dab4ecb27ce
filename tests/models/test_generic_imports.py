"""Modules that processes of the generic adapter leave out of the import of transformers: there when they are used."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # processes
ROOT = Path(__file__).parents[2]
CLASSES = """
    import json, sys
    import transformers.models, transformers.models.llava.modeling_llava
    places = {name: home for module in (transformers, transformers.models) for name, home in
              module._class_to_module.items()}
"""


def run(code: str) -> Any:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_compiler_and_distributed_tensors_are_left_out_and_no_class_of_transformers_is() -> None:
    left_out = ("torch._dynamo.eval_frame", "torch.distributed.tensor", "torch.distributed.fsdp", "triton")
    look = f"print(json.dumps([places, [name for name in {left_out!r} if name in sys.modules]]))"
    places, imported = run("import hydra_transformers.preload\n" + textwrap.dedent(CLASSES) + look)
    in_full, imported_in_full = run(textwrap.dedent(CLASSES) + look)
    assert imported == [] and set(imported_in_full) > {"torch._dynamo.eval_frame", "torch.distributed.tensor"}
    assert places == in_full and len(places) > 1000


def test_the_compiler_is_there_when_it_is_used() -> None:
    code = """
        import json, sys
        import hydra_transformers.preload, torch
        import torch._dynamo.config
        doubled = torch.compile(lambda x: x + x, backend="eager")(torch.ones(1)).item()
        print(json.dumps([doubled, type(sys.modules["torch._dynamo"]).__name__]))
    """
    assert run(code) == [2.0, "module"]


def test_its_decorators_run_none_of_it() -> None:
    code = """
        import json, sys
        import hydra_transformers.preload, torch
        @torch.compiler.disable(recursive=False)
        def double(x): return x + x
        again = torch.compiler.allow_in_graph(torch.compiler.disable(double))
        print(json.dumps([again is double, "torch._dynamo.eval_frame" in sys.modules]))
    """
    assert run(code) == [True, False]

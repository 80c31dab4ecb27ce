"""`hydra-engine quantize DIR OUT --quantization int4`: writes a checkpoint in compressed-tensors' format, which starts
faster than quantising at start and which transformers and vLLM load too."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra_engine.config import EngineConfig, find_model
from hydra_engine.core.units import size
from hydra_engine.errors import CheckpointError


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s MODEL OUT --quantization int8|int4 [--ignore NAME ...]"
    parser.add_argument("model", metavar="MODEL", help="Hugging Face model directory, or hub id in the local cache")
    parser.add_argument("out", metavar="OUT", help="folder to write, which must not exist")
    parser.add_argument(
        "--quantization",
        choices=("int8", "int4"),
        required=True,
        help="bits of the decoder's matrices; int4: in groups of 32 inputs, the head in 8 bits",
    )
    parser.add_argument(
        "--ignore",
        nargs="+",
        default=[],
        metavar="NAME",
        help="modules that stay as they are, such as lm_head, or a regular expression after re:",
    )


def run(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    if arguments.model.endswith(".gguf") and Path(arguments.model).is_file():
        raise CheckpointError(
            f"{arguments.model!r} is a GGUF file, which is served as it is; give the folder or hub id of the model's "
            "safetensors"
        )
    folder, out = find_model(EngineConfig(model=arguments.model)).model_path, Path(arguments.out)
    writer: Any = import_module("hydra_quantizer.writer")  # loads torch
    # None: a bar only on a terminal
    with tqdm(desc="quantizing", unit="B", unit_scale=True, unit_divisor=1024, disable=None) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        writer.write_quantized(folder, out, arguments.quantization, arguments.ignore, advance)
    before, after = (sum(path.stat().st_size for path in place.glob("*.safetensors")) for place in (folder, out))
    sys.stdout.write(f"{out}: {size(after)} of weights instead of {size(before)}\n")
    return 0

"""Several benchmarks in one process: a model's weights are drawn, and the device's ceilings measured, once.

`python -m bench.micro.together decode,profile --model NAME --dir DIR` runs those of a model, without `--model` those of
single operations; DIR gets each one's document, `PREFIXdecode-NAME.json`. One that fails takes nothing from the next.
With `--resume` only those are run that have no document: what a run that crashed has not begun. Any other flag goes to
the benchmarks that know it, `--rows 1,8` to all of these and `--repeat 3` to one.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

OF_MODEL = ("decode", "profile", "prefill", "encode")
OF_OPERATIONS = ("layer", "attn_decode", "cache_write", "quantized", "attn_prefill", "products")


def document_of(folder: Path, prefix: str, bench: str, model: str | None) -> Path:
    return folder / f"{prefix}{'-'.join(filter(None, (bench, model)))}.json"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benches", type=lambda text: text.split(","), help="names, with commas")
    parser.add_argument("--model", help="a directory, 'demo' or the name of a shape")
    parser.add_argument("--dir", type=Path, required=True, help="where the documents go")
    parser.add_argument("--prefix", default="", help="of the documents' names")
    parser.add_argument("--resume", action="store_true", help="only those without a document")
    parser.add_argument("--no-peers", action="store_true", help="without transformers and torch")
    options, flags = parser.parse_known_args(argv)
    known = OF_OPERATIONS if options.model is None else OF_MODEL
    if unknown := [bench for bench in options.benches if bench not in known]:
        parser.error(f"no benchmark {unknown[0]!r} here; there are {', '.join(known)}")
    model = None if options.model is None else Path(options.model).name
    paths = {bench: document_of(options.dir, options.prefix, bench, model) for bench in options.benches}
    if options.resume:
        paths = {bench: path for bench, path in paths.items() if not path.exists()}
    if not paths:
        print("nothing is left to run")
        return 0
    return _run(parser, options, flags, paths)


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace, flags: list[str], paths: dict[str, Path]) -> int:
    import torch

    from bench.micro import profile
    from bench.micro.harness import parse_known
    from bench.micro.subject import run_together

    benches, unknown = {}, [word for word in flags if word.startswith("--")]
    for bench, path in paths.items():
        module = importlib.import_module(f"bench.micro.{bench}")
        model = [] if options.model is None else ["--model", options.model]
        given = [*flags, *model, "--json", str(path)]
        arguments, others = parse_known(module.__doc__, module.options, given)
        unknown = [word for word in unknown if word in others]
        arguments.no_peers = options.no_peers
        benches[bench] = arguments, module.measure
        if module is profile:
            profile.prepare(torch.device(arguments.device))
    if unknown:
        parser.error(f"none of {', '.join(paths)} knows {unknown[0]}")
    problems = run_together(benches, options.model)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Captions for a folder of pictures, many at once, with a progress bar: python examples/captions.py [MODEL] [FOLDER]"""

import sys
from pathlib import Path

from hydra_engine import Engine

PICTURES = Path(__file__).parents[1] / "hydra_engine" / "demo" / "pictures"


def main(model: str = "demo", folder: str | Path = PICTURES) -> None:
    files = sorted(path for path in Path(folder).iterdir() if path.suffix in (".png", ".jpg", ".jpeg", ".webp"))
    prompts = ["Describe the picture."] * len(files)
    with Engine(model) as engine:
        # One list of prompts, and one picture (or None, or a list of them) for each. A file that cannot be read fails
        # alone: with on_error="return" its Result has an `error`.
        results = engine.generate(prompts, images=files, temperature=0, max_tokens=64, progress=True, on_error="return")
    for file, result in zip(files, results, strict=True):
        print(f"{file.name}: {result.error or result.text}")


if __name__ == "__main__":
    main(*sys.argv[1:])

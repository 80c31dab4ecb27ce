"""An answer as it is written; leaving the loop ends the request: python examples/streaming.py [MODEL] [PICTURE]"""

import sys
from pathlib import Path

from hydra_engine import Engine

PICTURE = Path(__file__).parents[1] / "hydra_engine" / "demo" / "pictures" / "stars.png"


def main(model: str = "demo", picture: str | Path = PICTURE) -> None:
    with Engine(model) as engine:
        for piece in engine.stream("Describe the picture.", picture, temperature=0, max_tokens=64):
            print(piece.text, end="", flush=True)
            if piece.result is not None:  # the last piece
                metrics, usage = piece.result.metrics, piece.result.usage
                print(f"\nfirst token after {1e3 * (metrics.ttft_s or 0):.0f} ms, {usage.completion_tokens} tokens")
        for piece in engine.stream("Describe the picture.", picture, temperature=0, max_tokens=64):
            print(piece.text, end="", flush=True)
            if "," in piece.text:
                print(" ... that is enough")
                break  # the engine stops generating


if __name__ == "__main__":
    main(*sys.argv[1:])

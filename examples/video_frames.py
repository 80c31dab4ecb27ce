"""A question about a video: python examples/video_frames.py [MODEL VIDEO]

The demo takes no videos. Without a model this makes a miniature of Qwen2.5-VL with random weights: it shows the way,
and its words mean nothing. With one, VIDEO is a file or a URL (files need PyAV, `pip install av`).
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw

from hydra_engine import Engine


def drawn_frames(count: int = 8) -> list[Image.Image]:
    """A red ball that moves to the right."""
    frames = []
    for number in range(count):
        frame = Image.new("RGB", (112, 56), "white")
        left = number * 80 // count
        ImageDraw.Draw(frame).ellipse((left, 14, left + 28, 42), fill="red")
        frames.append(frame)
    return frames


def ask(model: str | Path, video: str | list[Image.Image]) -> None:
    with Engine(model) as engine:
        # A list of pictures is one video, of two frames a second; a list of lists, or of files, are several.
        result = engine.generate("What moves?", videos=video, temperature=0, max_tokens=16)
    print(f"{result.usage.prompt_tokens} tokens of prompt, {result.usage.image_tokens} of them are the video's")
    print(repr(result.text))


def main() -> None:
    if len(sys.argv) > 2:
        ask(sys.argv[1], sys.argv[2])
        return
    sys.path.insert(0, str(Path(__file__).parents[1]))  # miniatures are the repository's, not the package's
    from tools.miniatures import make_tiny

    with tempfile.TemporaryDirectory() as folder:
        make_tiny("qwen2_5_vl", Path(folder), seed=3)
        ask(folder, drawn_frames())


if __name__ == "__main__":
    main()

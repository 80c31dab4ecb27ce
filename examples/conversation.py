"""Several turns with two pictures: python examples/conversation.py [MODEL]

What came before is in the KV cache: each turn computes only what is new. The demo was trained on one picture at a time
and mixes two of them up easily; larger models tell them apart.
"""

import sys
from pathlib import Path
from typing import Any

from hydra_engine import Engine

PICTURES = Path(__file__).parents[1] / "hydra_engine" / "demo" / "pictures"
TURNS = [
    (PICTURES / "diamonds.png", "How many objects are there?"),
    (None, "How many red objects are there?"),
    (PICTURES / "stars.png", "What color is the star?"),
]


def main(model: str = "demo") -> None:
    messages: list[dict[str, Any]] = []
    with Engine(model) as engine:
        for picture, question in TURNS:
            content: list[dict[str, Any]] = [{"type": "text", "text": question}]
            if picture is not None:
                content.insert(0, {"type": "image", "image": picture})  # OpenAI's image_url does as well
            messages.append({"role": "user", "content": content})
            result = engine.chat(messages, temperature=0, max_tokens=64)
            messages.append({"role": "assistant", "content": result.text})
            usage = result.usage
            print(f"{question} {result.text}")
            print(f"    {usage.prompt_tokens} tokens, {usage.cached_tokens} of them from the cache")


if __name__ == "__main__":
    main(*sys.argv[1:])

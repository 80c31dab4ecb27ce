"""JSON that fits a schema, from a picture: python examples/json_from_picture.py [MODEL] [PICTURE]"""

import json
import sys
from pathlib import Path

from hydra_engine import Engine

PICTURE = Path(__file__).parents[1] / "hydra_engine" / "demo" / "pictures" / "stars.png"
# Whatever the model, the answer is JSON of this form. The demo speaks in whole sentences, so it chooses among such.
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"enum": [f"There are {number} objects." for number in ("no", "two", "three", "four", "five")]},
    },
    "required": ["answer"],
    "additionalProperties": False,
}


def main(model: str = "demo", picture: str | Path = PICTURE) -> None:
    # As in the OpenAI API. A pydantic model does as well: response_format=MyModel.
    form = {"type": "json_schema", "json_schema": {"name": "count", "schema": SCHEMA}}
    with Engine(model) as engine:
        result = engine.generate("How many objects are there?", picture, temperature=0, response_format=form)
    print(json.loads(result.text))


if __name__ == "__main__":
    main(*sys.argv[1:])

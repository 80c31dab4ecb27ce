"""Published models by their sizes: directories without weights, to be served with `--load-format random`.

    python -m hydra_engine.models.tiny --shape qwen2.5-vl-7b DIR

The JSON files beside this one hold what the models' own configurations say. The tokenizer is the miniatures' with as
many words as the model has; what such a model answers means nothing, what it costs does.
"""

from __future__ import annotations

import json
from pathlib import Path

import transformers

from hydra_engine.models.tiny import TINY
from hydra_engine.models.tiny.base import save_processor

_FOLDER = Path(__file__).parent
SHAPES = tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))
_ARCHITECTURES = {
    "llava": "LlavaForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
}


def make_shape(name: str, directory: Path) -> None:
    """Writes everything but the weights of `name`, one of SHAPES."""
    shape = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    family = TINY[shape["family"]]
    config = family.build_config(shape["text"], shape["vision"], {})
    config.architectures = [_ARCHITECTURES[shape["family"]]]
    config.dtype = "bfloat16"
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    transformers.GenerationConfig.from_model_config(config).save_pretrained(directory)
    save_processor(directory, config, family)
    if "picture_size" in shape:
        path = directory / "preprocessor_config.json"
        settings = json.loads(path.read_text(encoding="utf-8"))
        settings["size"] = shape["picture_size"]
        path.write_text(json.dumps(settings, indent=2), encoding="utf-8")

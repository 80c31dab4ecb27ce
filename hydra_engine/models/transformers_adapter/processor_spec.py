"""A model's own processor, of transformers, at work on one picture: what takes the placeholder's place in a prompt, and
the arrays that the vision tower wants.

Imported only where torch may be loaded. Reads the model directory alone. Does not know sockets or requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import transformers
from PIL import Image
from transformers.utils import import_utils

from hydra_engine.errors import CheckpointError, InvalidImage
from hydra_engine.models.specs.base import ProcessorSpec
from hydra_engine.models.specs.fields import Fields, read_json_if_present

Array = npt.NDArray[Any]

# What processors raise on pictures, settings and files that they cannot take; their classes say no more than that.
PROCESSOR_ERRORS = (
    OSError,
    ImportError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    MemoryError,
)
_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


def in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]


@dataclass(frozen=True, slots=True)
class Expansion:
    """What one picture is in a prompt: text, then `token_ids` from the first image token to the last, then text.
    `arrays` are the arguments of the model's get_image_features by name, for this picture alone."""

    before: str
    token_ids: list[int]
    behind: str
    arrays: dict[str, Array]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def num_patches(self, patch_size: int) -> int:
        """What the tower computes, in squares of RGB pixels."""
        pixels = max((array.size for name, array in self.arrays.items() if "pixel_values" in name), default=0)
        return max(pixels // (3 * patch_size**2), 1)


class PictureProcessor:
    """`inputs` are the arguments that get_image_features knows; `image_token_id` is what the model replaces by
    features. Raises CheckpointError when the processor cannot be loaded."""

    def __init__(
        self, model_dir: Path, model_type: str, *, image_token_id: int, inputs: Sequence[str], trust_remote_code: bool
    ) -> None:
        self._image_token_id = image_token_id
        self._inputs = tuple(inputs)
        self._processor = load_processor(model_dir, model_type, trust_remote_code=trust_remote_code)
        self._tokenizer = self._processor.tokenizer
        image_token = getattr(self._processor, "image_token", None)
        self.placeholder = str(image_token or self._tokenizer.convert_ids_to_tokens(image_token_id))
        self.placeholder_id = int(self._tokenizer.convert_tokens_to_ids(self.placeholder))

    @classmethod
    def of(cls, spec: ProcessorSpec) -> PictureProcessor:
        return cls(
            Path(spec.model_dir),
            spec.model_type,
            image_token_id=spec.image_token_id,
            inputs=spec.inputs,
            trust_remote_code=spec.trust_remote_code,
        )

    def outputs(self, image: Image.Image, behind: str = "") -> Mapping[str, Any]:
        """All that the processor makes of a prompt which is one RGB picture with text behind it, as torch tensors.
        Raises InvalidImage where it refuses."""
        try:
            outputs: Mapping[str, Any] = self._processor(
                images=[image], text=[self.placeholder + behind], add_special_tokens=False, return_tensors="pt"
            )
        except PROCESSOR_ERRORS as error:
            raise InvalidImage(
                f"the model's processor cannot take a picture of {image.width} x {image.height} pixels"
            ) from error
        return outputs

    def expand(self, image: Image.Image) -> Expansion:
        outputs = self.outputs(image)
        ids = outputs["input_ids"][0].tolist()
        places = [place for place, id in enumerate(ids) if id == self._image_token_id]
        if not places:
            raise InvalidImage("the model's processor puts no image token in the picture's place")
        first, end = places[0], places[-1] + 1
        return Expansion(
            before=self._text(ids[:first]),
            token_ids=ids[first:end],
            behind=self._text(ids[end:]),
            arrays={name: _array(name, outputs[name]) for name in self._inputs if outputs.get(name) is not None},
        )

    def sees_itself(self, image: Image.Image) -> bool:
        """Whether the processor marks the image tokens for a mask in which they see each other."""
        outputs = self.outputs(image)
        marks = outputs.get("token_type_ids")
        return marks is not None and bool(marks[outputs["input_ids"] == self._image_token_id].any())

    def _text(self, ids: Sequence[int]) -> str:
        """Text, because it is tokenised together with what stands next to it in the prompt."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if self._tokenizer(text, add_special_tokens=False)["input_ids"] != list(ids):
            raise CheckpointError("the text around pictures in this model's prompts does not survive its tokenizer")
        return text


def num_runs(token_ids: Sequence[int], image_token_id: int) -> int:
    """How many pieces of nothing but image tokens there are."""
    return sum(is_image for is_image, _ in itertools.groupby(id == image_token_id for id in token_ids))


def _array(name: str, value: Any) -> Array:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):  # a list of arrays of several shapes
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "biuf":
        raise CheckpointError(f"the model's processor gives {name} in a form that is not one array of numbers")
    return np.ascontiguousarray(array)


def load_processor(model_dir: Path, model_type: str, *, trust_remote_code: bool) -> Any:
    """transformers' processor for pictures and text. Raises CheckpointError where it cannot be loaded."""
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        if not trust_remote_code and not import_utils.is_torchvision_available():
            processor_class = _class_of(model_dir, model_type)
            if processor_class is not None and "video_processor" in processor_class.get_attributes():
                return _pictures_only(processor_class).from_pretrained(str(model_dir), **options)
        return transformers.AutoProcessor.from_pretrained(str(model_dir), **options)
    except PROCESSOR_ERRORS as error:
        hint = "" if import_utils.is_torchvision_available() else "; it may need torchvision, which is not installed"
        raise CheckpointError(f"transformers cannot load the model's processor: {in_one_line(error)}{hint}") from error


def _class_of(model_dir: Path, model_type: str) -> Any:
    """The processor's class as the directory's files or else transformers' table name it; None where neither does."""
    files = (read_json_if_present(model_dir, name) or Fields({}, name) for name in _FILES)
    class_name = next((name for file in files if (name := file.get("processor_class"))), None)
    if isinstance(class_name, str):
        return getattr(transformers, class_name, None)
    configs = transformers.CONFIG_MAPPING
    return transformers.PROCESSOR_MAPPING.get(configs[model_type], None) if model_type in configs else None


def _pictures_only(processor: Any) -> Any:
    """The class without the part for videos, which needs torchvision; pictures never go through it."""

    class PicturesOnly(processor):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in processor.get_attributes() if name != "video_processor"]

        @classmethod
        def get_processor_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            values, others = super().get_processor_dict(*args, **kwargs)
            return values | {"video_processor": None}, others

    PicturesOnly.__name__ = processor.__name__  # transformers makes exceptions by name
    return PicturesOnly

"""Runs a model's own processor, of transformers, on one picture: the replacement of the placeholder in a prompt, and
the arrays for the vision tower.

Imported only where torch may be loaded. Reads the model directory alone. Does not know sockets or requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers.utils import import_utils

from hydra_engine.errors import CheckpointError, InvalidImage
from hydra_engine.models.specs.base import ProcessorSpec
from hydra_engine.models.specs.fields import Fields, read_json_if_present
from hydra_engine.models.specs.vision import NO_PROCESSOR
from hydra_transformers.classes import load_config, model_class
from hydra_transformers.rope import RopeIndex, Span, find_rope_index, grid_of, positions_on, true_positions
from hydra_transformers.spec import PROCESSOR_ERRORS, describe_error

Array = npt.NDArray[Any]
TokenTypes = dict[int, int]  # by token id

_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_TORCH_INDEX = "https://download.pytorch.org/whl"  # of builds for one kind of hardware
# Texts after the last pictures of one prompt: between words, and side by side with a word that follows at once.
_BEHIND = ((" one", " two", " three"), ("", "", "three"))


@dataclass(frozen=True, slots=True)
class Expansion:
    """The expansion of one picture in a prompt: text, then `token_ids` from the first image token to the last, then
    text. `arrays` are the arguments of the model's get_image_features by name, for this picture alone."""

    prefix: str
    token_ids: list[int]
    suffix: str
    arrays: dict[str, Array]
    grid: tuple[int, int] = (0, 0)  # (rows, columns) of the tokens where positions have three axes

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def num_patches(self, patch_size: int) -> int:
        """Number of patches of the tower, estimated from the pixel values as squares of RGB pixels."""
        pixels = max((array.size for name, array in self.arrays.items() if "pixel_values" in name), default=0)
        return max(pixels // (3 * patch_size**2), 1)


class PictureProcessor:
    """A model's processor for pictures. `inputs` are the arguments of get_image_features; `image_token_id` is the token
    that the model replaces by features; `rope_index` counts positions where they have three axes. Raises
    CheckpointError if the processor cannot be loaded."""

    def __init__(
        self,
        model_dir: Path,
        model_type: str,
        *,
        image_token_id: int,
        inputs: Sequence[str],
        rope_index: RopeIndex | None,
        trust_remote_code: bool,
    ) -> None:
        self._image_token_id = image_token_id
        self._inputs = tuple(inputs)
        self._rope_index = rope_index
        self._processor = load_processor(model_dir, model_type, trust_remote_code=trust_remote_code)
        self._tokenizer = self._processor.tokenizer
        # A few have another token for a picture in a prompt than for its features.
        names = ("image_placeholder_token", "image_token")
        image_token = next(filter(None, (getattr(self._processor, name, None) for name in names)), None)
        self.placeholder = str(image_token or self._tokenizer.convert_ids_to_tokens(image_token_id))
        placeholder_id = self._tokenizer.convert_tokens_to_ids(self.placeholder)
        if placeholder_id is None or placeholder_id == self._tokenizer.unk_token_id:
            raise CheckpointError(
                f"the tokenizer does not know {self.placeholder!r}, which the model's processor takes for a picture; "
                "use the tokenizer's files that came with the model"
            )
        self.placeholder_id = int(placeholder_id)

    @classmethod
    def from_spec(cls, spec: ProcessorSpec) -> PictureProcessor:
        model_dir, rope_index = Path(spec.model_dir), None
        if spec.multimodal:
            config = load_config(model_dir, trust_remote_code=spec.trust_remote_code)
            model = model_class(config, model_dir, trust_remote_code=spec.trust_remote_code)
            rope_index = find_rope_index(config, model)
        return cls(
            model_dir,
            spec.model_type,
            image_token_id=spec.image_token_id,
            inputs=spec.inputs,
            rope_index=rope_index,
            trust_remote_code=spec.trust_remote_code,
        )

    def outputs(self, *pictures: tuple[Image.Image, str]) -> Mapping[str, Any]:
        """Runs the processor on a prompt of RGB pictures, each followed by a text, and returns all its outputs as torch
        tensors. Raises CheckpointError if it fails."""
        images = [image for image, _ in pictures]
        text = ["".join(self.placeholder + behind for _, behind in pictures)]
        failures: list[Exception] = []
        # By prompt, as chat templates of transformers give them, and for processors that know no such lists in a row.
        for layout in ([images], images):
            try:
                outputs: Mapping[str, Any] = self._processor(
                    images=layout, text=text, add_special_tokens=False, return_tensors="pt"
                )
                return outputs
            except PROCESSOR_ERRORS as error:
                failures.append(error)
        sizes = " and ".join(f"{image.width} x {image.height}" for image in images)
        raise CheckpointError(
            f"the model's processor fails on a prompt of {text[0]!r} with pictures of {sizes} pixels: "
            f"{describe_error(failures[-1])}"
        ) from failures[-1]

    def expand(self, image: Image.Image) -> Expansion:
        """Expands one picture. Raises InvalidImage if the processor cannot take it."""
        try:
            outputs = self.outputs((image, ""))
        except CheckpointError as error:
            raise InvalidImage(
                f"the model's processor cannot take a picture of {image.width} x {image.height} pixels"
            ) from error
        ids = outputs["input_ids"][0].tolist()
        places = [place for place, id in enumerate(ids) if id == self._image_token_id]
        if not places:
            raise InvalidImage("the model's processor puts no image token in the picture's place")
        first, end = places[0], places[-1] + 1
        positions = self._positions(outputs)
        return Expansion(
            prefix=self._text(ids[:first]),
            token_ids=ids[first:end],
            suffix=self._text(ids[end:]),
            arrays={name: _array(name, outputs[name]) for name in self._inputs if outputs.get(name) is not None},
            grid=(0, 0) if positions is None else grid_of(positions, (first, end)),
        )

    def _positions(self, outputs: Mapping[str, Any]) -> Tensor | None:
        """Returns a prompt's positions on three axes, by the model; None if they have one."""
        if self._rope_index is None:
            return None
        try:
            return true_positions(self._rope_index, outputs, self._image_token_id)
        except PROCESSOR_ERRORS as error:
            raise CheckpointError(f"the model's positions cannot be counted: {describe_error(error)}") from error

    def joins_pictures(self, images: Sequence[Image.Image]) -> bool:
        """True if several pictures in one prompt give the same text, positions and tower arrays as each alone."""
        expansions = [self.expand(image) for image in images]
        texts = (behind[-len(images) :] for behind in _BEHIND)
        return all(self._joins(expansions, list(zip(images, behind, strict=True))) for behind in texts)

    def _joins(self, expansions: Sequence[Expansion], pictures: Sequence[tuple[Image.Image, str]]) -> bool:
        try:
            outputs = self.outputs(*pictures)
        except CheckpointError:  # it takes one
            return False
        image_token = self._tokenizer.convert_ids_to_tokens(self._image_token_id)
        parts = zip(expansions, pictures, strict=True)
        text = "".join(f"{found.prefix}{image_token}{found.suffix}{behind}" for found, (_, behind) in parts)
        spans, expected = list[Span](), list[int]()
        for id in self._tokenizer(text, add_special_tokens=False)["input_ids"]:
            if id == self._image_token_id:
                begin = len(expected)
                expected += expansions[len(spans)].token_ids
                spans.append((begin, len(expected)))
            else:
                expected.append(id)
        if outputs["input_ids"][0].tolist() != expected:
            return False
        # Chat templates put marks around pictures; side by side without them they are no prompt that a model can count.
        positions = self._positions(outputs) if all(behind for _, behind in pictures) else None
        grids = [found.grid for found in expansions]
        if positions is not None and not torch.equal(positions_on(spans, grids, len(expected))[0], positions):
            return False
        # A tower whose only input is pixels cannot distinguish them from padding to the size of another picture.
        # Towers with further inputs are compared when the weights are loaded.
        alone = [found.arrays for found in expansions]
        return len(alone[0]) > 1 or all(_is_joined(outputs[name], [each[name] for each in alone]) for name in alone[0])

    def token_types(self, names: Sequence[str], marks: Sequence[int], image: Image.Image) -> dict[str, TokenTypes]:
        """Returns outputs of the processor that have a number for each token, as numbers by token id; 0 is left out.
        `marks`: further tokens whose numbers are wanted. Raises CheckpointError if they do not follow from the ids."""
        outputs = self.outputs((image, "".join(self._tokenizer.convert_ids_to_tokens(list(marks)))))
        found: dict[str, TokenTypes] = {}
        for name in names:
            types: TokenTypes = {}
            for id, number in zip(outputs["input_ids"][0].tolist(), outputs[name][0].tolist(), strict=True):
                if types.setdefault(id, number) != number:
                    raise CheckpointError(
                        f"the model's processor gives {name}, which does not follow from the token ids, and the engine "
                        "has nothing else to make it of"
                    )
            found[name] = {id: number for id, number in types.items() if number}
        return found

    def image_attends_to_itself(self, image: Image.Image) -> bool:
        """True if the processor marks the image tokens as attending to each other."""
        outputs = self.outputs((image, ""))
        marks = outputs.get("token_type_ids")
        return marks is not None and bool(marks[outputs["input_ids"] == self._image_token_id].any())

    def _text(self, ids: Sequence[int]) -> str:
        """Decodes to text, because it is tokenised again together with its neighbours in the prompt. Raises
        CheckpointError if that would change the tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if self._tokenizer(text, add_special_tokens=False)["input_ids"] != list(ids):
            raise CheckpointError("the text around pictures in this model's prompts does not survive its tokenizer")
        return text


def load_in_child(spec: ProcessorSpec) -> PictureProcessor:
    """Loads the processor for a process of its own, one of several."""
    torch.set_num_threads(1)
    return PictureProcessor.from_spec(spec)


def num_runs(token_ids: Sequence[int], image_token_id: int) -> int:
    """Number of runs of adjacent image tokens."""
    return sum(is_image for is_image, _ in itertools.groupby(id == image_token_id for id in token_ids))


def _array(name: str, value: Any) -> Array:
    what = "something else than numbers"
    try:
        array = np.asarray(_as_numpy_can(value))
    except (ValueError, TypeError):
        array, what = np.empty(0, dtype=object), "several arrays of different shapes"
    if array.dtype.kind not in "biuf":
        raise CheckpointError(f"the model's processor gives {what} as {name}, where the engine takes one array")
    return np.ascontiguousarray(array)


def _as_numpy_can(value: Any) -> Any:
    """Converts bfloat16 to float32, which is exact; numpy has no bfloat16."""
    if isinstance(value, list | tuple):
        return [_as_numpy_can(item) for item in value]
    return value.float() if str(getattr(value, "dtype", "")) == "torch.bfloat16" else value


def _is_joined(together: Any, alone: Sequence[Array]) -> bool:
    """True if `together` is the concatenation of `alone` along the first or the second axis."""
    for axis in (0, 1):
        try:
            if np.array_equal(_array("", together), np.concatenate(alone, axis)):
                return True
        except ValueError:  # not along this one
            continue
    return False


def load_processor(model_dir: Path, model_type: str, *, trust_remote_code: bool) -> Any:
    """Loads transformers' processor for pictures and text. Raises CheckpointError if it cannot be loaded."""
    if not trust_remote_code and all(read_json_if_present(model_dir, name) is None for name in _FILES[:2]):
        raise CheckpointError(NO_PROCESSOR)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    kind: Any = transformers.AutoProcessor
    try:
        if not trust_remote_code and not import_utils.is_torchvision_available():
            processor_class = _class_of(model_dir, model_type)
            if processor_class is not None and "video_processor" in processor_class.get_attributes():
                kind = _pictures_only(processor_class)
        processor = kind.from_pretrained(str(model_dir), **options)
    except PROCESSOR_ERRORS as error:
        is_missing = "torchvision" in str(error).lower() and not import_utils.is_torchvision_available()
        reason = _torchvision_is_missing() if is_missing else describe_error(error)
        raise CheckpointError(f"transformers cannot load the model's processor: {reason}") from error
    if not isinstance(processor, transformers.ProcessorMixin):
        raise CheckpointError(
            f"transformers finds a {type(processor).__name__} in the model directory and no processor for pictures and "
            "text; use the processor_config.json that came with the model"
        )
    return processor


def _torchvision_is_missing() -> str:
    """Returns advice on installing the torchvision that matches the installed torch."""
    version, _, build = metadata.version("torch").partition("+")
    index = f" --index-url {_TORCH_INDEX}/{build}" if build else ""
    return f'it needs torchvision, which is not installed; run: pip install "torch=={version}" torchvision{index}'


def _class_of(model_dir: Path, model_type: str) -> Any:
    """Returns the processor's class named by the directory's files, else by transformers' table; None if neither has
    one."""
    files = (read_json_if_present(model_dir, name) or Fields({}, name) for name in _FILES)
    class_name = next((name for file in files if (name := file.get("processor_class"))), None)
    if isinstance(class_name, str):
        return getattr(transformers, class_name, None)
    configs = transformers.CONFIG_MAPPING
    return transformers.PROCESSOR_MAPPING.get(configs[model_type], None) if model_type in configs else None


class _WithoutVideos(transformers.ProcessorMixin):
    """Stands between a processor and its base, which counts the parts that it is given."""

    def __init__(self, *parts: Any, **kwargs: Any) -> None:
        super().__init__(*(part for part in parts if part is not None), **kwargs)


def _pictures_only(processor: Any) -> Any:
    """Derives a class without the video processor, which needs torchvision and is not used for pictures."""
    names = processor.get_attributes()

    class PicturesOnly(processor, _WithoutVideos):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in names if name != "video_processor"]

        @classmethod
        def from_args_and_dict(cls, args: Sequence[Any], *others: Any, **kwargs: Any) -> Any:
            place = names.index("video_processor")
            return super().from_args_and_dict([*args[:place], None, *args[place:]], *others, **kwargs)

    PicturesOnly.__name__ = processor.__name__  # transformers makes exceptions by name
    return PicturesOnly

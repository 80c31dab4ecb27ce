"""Checkpoints that run with transformers' own modules (`--model-impl transformers`): what the engine must know of them.

Numbers come from transformers' config class and from its processor at work, because config.json leaves out what equals
a class's defaults. `describe_spec.py` reads them, in a process of its own where this one has no torch. Does not know
how a picture is cut: the model's processor does, for every picture.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import CheckpointError, ErrorInfo, from_info
from hydra_engine.models.specs.assemble import ModelFiles
from hydra_engine.models.specs.base import LanguageSpec, MediaPlan, ModelSpec, PreprocessSpec, View, VisionSpec
from hydra_engine.models.specs.decoder import stored_dtype
from hydra_engine.models.specs.geometry import check_picture

FAMILY = "transformers"
# An array of every payload besides those for the model: the token ids of the span, [num_tokens] int64.
SPAN_TOKEN_IDS = "span_token_ids"

_DESCRIBE_SECONDS = 300.0
_COMMAND = (sys.executable, "-m", "hydra_engine.models.transformers_adapter.describe_spec")


@dataclass(frozen=True, slots=True)
class PictureFacts:
    """What the processor makes of pictures. `inputs` are the arguments that the model's get_image_features knows; the
    largest numbers are those of a few pictures of ordinary and extreme shapes."""

    model_type: str
    placeholder: str  # stands for one picture in a rendered prompt
    placeholder_id: int
    image_token_id: int  # stands for one feature
    whole: bool  # the features of a picture see each other
    inputs: tuple[str, ...]
    max_tokens: int  # of a span
    max_patches: int
    patch_size: int
    num_parameters: int  # of the tower, about
    identity: str


@dataclass(frozen=True, slots=True)
class Description:
    """What transformers says of a checkpoint."""

    architecture: str
    language: LanguageSpec
    bos_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]
    tokenizer_class: str
    pictures: PictureFacts | None


class Answer(msgspec.Struct):
    """Of the describing process; one of the two."""

    description: Description | None = None
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class GenericVisionSpec(VisionSpec):
    """A span is what the processor puts in a picture's place, from its first image token to its last one; text tokens
    in between belong to it, and the vision lane writes their embeddings."""

    facts: PictureFacts

    @property
    def max_tokens_per_image(self) -> int:
        return self.facts.max_tokens

    @property
    def max_patches_per_image(self) -> int:
        return self.facts.max_patches

    def plan_image(self, width: int, height: int, budget: PixelBudget = AS_CONFIGURED) -> MediaPlan:
        """What the processor is given, the picture as it is: what it makes of it is not known from the size alone, nor
        is it told a budget."""
        check_picture(width, height)
        return MediaPlan((View.whole(width, height),), ())

    def num_parameters(self) -> int:
        return self.facts.num_parameters

    def flops(self, num_patches: int) -> int:
        """Of the matrices alone."""
        return 2 * self.facts.num_parameters * num_patches


@dataclass(frozen=True, slots=True)
class GenericSpec(ModelSpec):
    """`image_token_id` is that of a feature; what stands for a picture in a rendered prompt is the vision's
    `facts.placeholder`."""

    model_dir: str = ""
    trust_remote_code: bool = False

    @property
    def placeholder_id(self) -> int | None:
        return self.vision.facts.placeholder_id if isinstance(self.vision, GenericVisionSpec) else None


def build_generic(files: ModelFiles) -> ModelSpec:
    """Raises CheckpointError for what the adapter cannot run, with the reason."""
    trusted = files.options.trust_remote_code
    description = _describe(str(files.model_dir), trusted, _stamp(files.model_dir))
    pictures = description.pictures
    config = files.config
    return GenericSpec(
        family=FAMILY,
        architecture=description.architecture,
        language=description.language,
        vision=None if pictures is None else _vision(pictures, description.language.hidden_size),
        image_token_id=None if pictures is None else pictures.image_token_id,
        bos_token_id=description.bos_token_id,
        pad_token_id=description.pad_token_id,
        eos_token_ids=description.eos_token_ids,
        dtype=stored_dtype(config, config.section_if_present("text_config") or config),
        model_dir=str(files.model_dir),
        tokenizer_class=description.tokenizer_class,
        trust_remote_code=trusted,
    )


def _vision(pictures: PictureFacts, feature_size: int) -> GenericVisionSpec:
    preprocess = PreprocessSpec("nearest", 1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), pictures.identity)
    return GenericVisionSpec(pictures, feature_size=feature_size, preprocess=preprocess)


def _stamp(model_dir: Path) -> tuple[tuple[str, int, int], ...]:
    """Changes when a file that a description follows from does."""
    stats = [(path.name, path.stat()) for path in model_dir.iterdir() if path.suffix in (".json", ".jinja", ".py")]
    return tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats))


@functools.lru_cache(maxsize=8)
def _describe(model_dir: str, trust_remote_code: bool, _stamp: object) -> Description:
    """Where torch is loaded anyway it is asked here, elsewhere (the front) in a process of its own."""
    if "torch" in sys.modules:
        from hydra_engine.models.transformers_adapter.describe_spec import (
            describe,  # imports transformers' models and torch
        )

        return describe(Path(model_dir), trust_remote_code=trust_remote_code)
    return _describe_elsewhere(model_dir, trust_remote_code)


def _describe_elsewhere(model_dir: str, trust_remote_code: bool) -> Description:
    flags = ["--trust-remote-code"] if trust_remote_code else []
    package_parent = str(Path(__file__).parents[3])
    # API keys are no business of code that may come with a model.
    known = {name: value for name, value in os.environ.items() if not name.startswith("HYDRA_")}
    path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [*_COMMAND, model_dir, *flags],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_DESCRIBE_SECONDS,
            env=known | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )
    except (OSError, subprocess.TimeoutExpired):
        raise CheckpointError("the process that asks transformers about the model did not answer") from None
    try:
        # The answer is the last line: libraries may write to the same place.
        answer = msgspec.json.decode(done.stdout.splitlines()[-1], type=Answer)
    except (IndexError, msgspec.MsgspecError):
        raise CheckpointError(f"transformers failed to read the model (exit status {done.returncode})") from None
    if answer.error is not None:
        raise from_info(answer.error)
    assert answer.description is not None
    return answer.description

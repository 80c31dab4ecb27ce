"""Token ids of conversations, as ours makes them and as transformers' own processor does, and the table of both.

    python -m tests.preprocess.prompt_parity [-n 100] [--write]

draws that many random conversations of each kind for every checkpoint of `published`, and prints how many have equal
ids; `--write` puts the table into docs/models.md. Exits with 1 where any differ. What torchvision would resize in
transformers' video processors is left out: their frames are chosen and counted, and the rest is the processor's.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import functools
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from jinja2.exceptions import TemplateError
from PIL import Image
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.video_utils import VideoMetadata

from hydra_engine.config import MediaConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.options import SpecOptions
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.errors import InvalidRequest
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.preprocess.text.tokenizer import load_tokenizer
from hydra_transformers.processor import load_processor
from tests.calls import asked
from tests.models.families import qwen3_vl
from tests.models.families.base import Clip
from tests.models.families.minicpmv import sampled
from tests.models.families.qwen2_vl import inputs as qwen2_inputs
from tests.preprocess.in_process import preprocessor_of
from tests.preprocess.published import CHECKPOINTS, Published, tokenizer_files, write_checkpoint

KINDS = ("text", "system", "turns", "a picture", "pictures", "videos", "tools", "continued", "typed marks")
DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- prompts: written by `python -m tests.preprocess.prompt_parity --write` -->", "<!-- prompts: end -->"
_PICTURES = {  # of processors that are put together here; AutoImageProcessor may ask for torchvision
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"), Qwen2VLImageProcessorPil),
    "minicpmv4_6": MiniCPMV4_6ImageProcessorPil,
    "smolvlm": SmolVLMImageProcessorPil,
}
SIZES = ((40, 32), (24, 61), (70, 50), (200, 30))
CLIPS = (((60, 50), 8, 1.5), ((24, 40), 5, 24.0))
_WORDS = (
    *(
        "the",
        "USER:",
        "What is",
        "12 buses",
        "2024",
        "naïve",
        "straße",
        "日本語",
        "🎉",
        "e\u0301",
        "▁",
        "Ġ",
        "def f(x):",
    ),
    *(" ", "  ", "\n", "\n\n", "\t", "!", "?!", "(", "...", "<", "a<b", "|", "[", "{}", "[inst]", "\u00a0", "\u200d"),
)
_TYPED = ("<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>")
_TYPED += ("<|vision_start|>", "<|eot_id|>", "<start_of_turn>", "<bos>", "<0x0A>", "<end_of_utterance>", "<tool_call>")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather <now>.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(slots=True)
class Chat:
    """`messages` in transformers' form, with pictures and videos in place."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    continued: bool = False


def kinds_of(published: Published) -> list[str]:
    """Kinds of conversation that a checkpoint and its template support."""
    known = {"a picture": bool(published.image), "pictures": bool(published.image), "videos": bool(published.video)}
    known |= {"tools": published.tools, "system": published.template != "smolvlm"}
    return [kind for kind in KINDS if known.get(kind, True)]


def draw(published: Published, kind: str, rng: random.Random) -> Chat:
    """A random conversation of that kind."""
    chat = Chat()
    typed = typed_marks(published) if kind == "typed marks" else ()
    if kind == "system" or (kind in ("tools", "typed marks") and rng.random() < 0.5):
        chat.messages.append(_message(published, "system", [_text(rng, typed)]))
    turns = rng.randint(2, 4) if kind in ("turns", "pictures", "videos") else 1
    for turn in range(turns):
        media = _media(kind, turn, rng)
        texts: list[Any] = [_text(rng, typed) for _ in range(rng.randint(1, 2) if media else 1)]
        parts = [*texts, *media]
        rng.shuffle(parts)
        chat.messages.append(_message(published, "user", parts))
        if turn < turns - 1:
            chat.messages.append(_message(published, "assistant", [_text(rng, typed)]))
    if kind == "tools":
        chat.tools = [WEATHER] * rng.randint(1, 2)
        if rng.random() < 0.6:
            arguments = {"city": _text(rng), "days": rng.randint(0, 9)}
            call = {"type": "function", "id": "call_0001", "function": {"name": "weather", "arguments": arguments}}
            chat.messages.append(_message(published, "assistant", [rng.choice(["", _text(rng, typed)])]))
            chat.messages[-1]["tool_calls"] = [call] * rng.randint(1, 2)
            chat.messages += [_message(published, "tool", [_text(rng, typed)])] * len(chat.messages[-1]["tool_calls"])
    if kind == "continued":
        chat.continued = True
        chat.messages.append(_message(published, "assistant", [f"So {_text(rng, typed)}"]))
    return chat


def _message(published: Published, role: str, parts: list[Any]) -> dict[str, Any]:
    if not published.parts:
        return {"role": role, "content": "".join(parts)}
    content = [{"type": "text", "text": part} if isinstance(part, str) else _part(part) for part in parts]
    return {"role": role, "content": content}


def _part(media: Image.Image | Clip) -> dict[str, Any]:
    if isinstance(media, Clip):
        return {"type": "video", "video": list(media.frames), "fps": media.fps}
    return {"type": "image", "image": media}


def typed_marks(published: Published) -> tuple[str, ...]:
    """Special tokens that stay tokens when users type them: neither written by the template nor ends of a sequence."""
    settings = tokenizer_files(published.tokenizer, published.extra, **dict(published.settings)).settings
    own = (settings.get("bos_token"), settings.get("eos_token"))
    return tuple(mark for mark in _TYPED if mark not in own and mark not in published.template_text)


def _text(rng: random.Random, typed: Sequence[str] = ()) -> str:
    words = [rng.choice(_WORDS) for _ in range(rng.randint(1, 6))]
    if typed:
        words.insert(rng.randint(0, len(words)), rng.choice(typed))
    text = "".join(word + rng.choice(("", " ")) for word in words)
    return text if text.strip() else text + "x"


def _media(kind: str, turn: int, rng: random.Random) -> list[Any]:
    if kind == "a picture":
        return [picture(rng.choice(SIZES))]
    if kind == "pictures":
        return [picture(rng.choice(SIZES), seed) for seed in range(rng.randint(turn == 0, 2))]
    if kind == "videos":
        clips = [clip(*rng.choice(CLIPS)) for _ in range(rng.randint(turn == 0, 2))]
        return [*clips, *(picture(rng.choice(SIZES)) for _ in range(rng.randint(0, 1)))]
    return []


@functools.cache
def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    noise = np.random.default_rng([seed, *size]).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


@functools.cache
def clip(size: tuple[int, int], num_frames: int, fps: float) -> Clip:
    return Clip(tuple(picture(size, seed) for seed in range(num_frames)), fps)


class Sides:
    """A checkpoint in the engine and in transformers."""

    def __init__(self, published: Published, directory: Path) -> None:
        write_checkpoint(published, directory)
        self.published, self.directory = published, directory
        options = SpecOptions(model_impl="transformers") if published.generic else SpecOptions()
        self.spec = load_spec(directory, options)
        name = self.spec.tokenizer_class
        self.tokenizer = load_tokenizer(directory, name)
        media = MediaConfig(max_images=16, max_videos=16)
        self.preprocessor = preprocessor_of(self.spec, self.tokenizer, media, max_model_len=16384)
        self.processor = self._processor()

    def _processor(self) -> Any:
        if self.spec.vision is None:
            return transformers.AutoProcessor.from_pretrained(self.directory)
        model_type = json.loads((self.directory / "config.json").read_text())["model_type"]
        if not self.published.video and model_type != "smolvlm":
            return load_processor(self.directory, model_type, trust_remote_code=False)
        kind = _without_torchvision(transformers.PROCESSOR_MAPPING[transformers.CONFIG_MAPPING[model_type]])
        values = kind.get_processor_dict(self.directory)[0]
        processor = kind(
            image_processor=_PICTURES[self.published.family].from_pretrained(self.directory),
            tokenizer=transformers.AutoTokenizer.from_pretrained(self.directory),
            video_processor=SimpleNamespace(
                merge_size=2, temporal_patch_size=2, slice_mode=True, downsample_mode="16x", num_frames=8, fps=1
            ),
            **{name: values[name] for name in ("chat_template", "image_seq_len") if name in values},
        )
        processor._process_videos = functools.partial(_process_videos, processor, self.directory)
        return processor

    async def ours(self, chat: Chat) -> list[int]:
        options = TemplateOptions(
            tuple(chat.tools), add_generation_prompt=not chat.continued, continue_final_message=chat.continued
        )
        call = asked(messages=_as_openai(chat.messages), template=options)
        prepared = await self.preprocessor.prepare(RequestId(1), call)
        ids = list(prepared.request.prompt_token_ids)
        for image, payload in zip(prepared.request.images, prepared.pixels, strict=True):
            if payload.arrays:  # the adapter: a span may hold text tokens, whose ids come first in its payload
                ids[image.start : image.end] = np.frombuffer(payload.data, np.int64, image.num_tokens).tolist()
        return ids

    def theirs(self, chat: Chat) -> list[int]:
        """Token ids by the method that users of transformers call."""
        told = copy.copy(chat.messages)  # it may change the list; the pictures stay the same objects
        options: dict[str, Any] = {
            "add_generation_prompt": not chat.continued,
            "continue_final_message": chat.continued,
        }
        found = self.processor.apply_chat_template(
            [dict(message) for message in told], tools=chat.tools or None, tokenize=True, return_dict=True, **options
        )["input_ids"]
        ids = found.tolist() if isinstance(found, torch.Tensor) else list(found)
        return ids[0] if ids and isinstance(ids[0], list) else ids


def _without_torchvision(processor: Any) -> Any:
    """The class, taking a video processor that only tells its settings."""

    class Lenient(processor):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name != "video_processor":
                super().check_argument_for_proper_class(argument_name, argument)

    Lenient.__name__ = processor.__name__
    return Lenient


def _as_openai(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments of calls as text, answers with the id of their call."""
    found = []
    for message in messages:
        known = dict(message)
        if "tool_calls" in message:
            known["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
        if message["role"] == "tool":
            known["tool_call_id"] = "call_0001"
        found.append(known)
    return found


def _process_videos(processor: Any, directory: Path, videos: Any, **_options: Any) -> tuple[dict[str, Any], list[str]]:
    """Replaces the processor's own method, which resizes; the texts are its own."""
    clips = [_clip_of(frames) for batch in videos for frames in batch]
    name = type(processor).__name__.removesuffix("Processor")
    if name.startswith("MiniCPM"):
        return {}, _minicpm_texts(processor, directory, clips)
    found: dict[str, Any] = {}
    if name.startswith("Qwen3"):
        found["video_grid_thw"] = qwen3_vl.inputs(directory, clips)["video_grid_thw"]
        settings = json.loads((directory / "video_preprocessor_config.json").read_text())
        own = qwen3_vl.videos.Qwen3VLVideoProcessor(**settings)
        found["video_metadata"] = [_metadata(own, one) for one in clips]
    else:
        found["video_grid_thw"] = qwen2_inputs(directory, clips)["video_grid_thw"]
    return {}, [processor.replace_video_token(found, index) for index in range(len(clips))]


def _metadata(video_processor: Any, clip: Clip) -> VideoMetadata:
    seen = VideoMetadata(total_num_frames=len(clip.frames), fps=clip.fps)
    seen.frames_indices = video_processor.sample_frames(seen)
    return seen


def _clip_of(frames: Any) -> Clip:
    known = (clip(*one) for one in CLIPS)
    return next(one for one in known if all(a is b for a, b in zip(one.frames, frames, strict=False)))


def _minicpm_texts(processor: Any, directory: Path, clips: list[Clip]) -> list[str]:
    pictures = MiniCPMV4_6ImageProcessorPil.from_pretrained(directory)
    frames = [sampled(directory, one) for one in clips]
    values = pictures([frame for one in frames for frame in one], return_tensors="pt")
    found = {
        "target_sizes_videos": np.asarray(values["target_sizes"]),
        "num_frames_per_video": [len(one) for one in frames],
        "grids_videos": np.asarray(values["grids"]),
    }
    return [processor.replace_video_token(found, index, video_token_divisor=16) for index in range(len(clips))]


async def both(sides: Sides, chat: Chat) -> tuple[list[int] | None, list[int] | None]:
    """None: the template cannot render it."""
    try:
        ours = await sides.ours(chat)
    except InvalidRequest:
        ours = None
    try:
        return ours, sides.theirs(chat)
    except (TemplateError, ValueError):
        return ours, None


async def differing(sides: Sides, kind: str, rng: random.Random, number: int) -> list[Chat]:
    """Random conversations, out of `number`, whose ids differ."""
    chats = [draw(sides.published, kind, rng) for _ in range(number)]
    results = [await both(sides, chat) for chat in chats]
    return [chat for chat, (ours, theirs) in zip(chats, results, strict=True) if ours != theirs or ours is None]


async def table(number: int) -> tuple[str, bool]:
    rows = [f"| checkpoint | {' | '.join(KINDS)} |", "| --- |" + " --- |" * len(KINDS)]
    all_equal = True
    for name, published in CHECKPOINTS.items():
        with tempfile.TemporaryDirectory() as folder:
            sides = Sides(published, Path(folder) / "model")
            cells = []
            for kind in KINDS:
                if kind not in kinds_of(published):
                    cells.append("")
                    continue
                bad = await differing(sides, kind, random.Random(f"{name} {kind}"), number)
                all_equal = all_equal and not bad
                cells.append(f"{number - len(bad)}/{number}")
            await sides.preprocessor.close()
        rows.append(f"| {name} | {' | '.join(cells)} |")
        print(rows[-1], file=sys.stderr, flush=True)
    return "\n".join(rows), all_equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("-n", type=int, default=100, help="conversations of each kind for each checkpoint")
    parser.add_argument("--write", action="store_true", help="into docs/models.md")
    asked = parser.parse_args()
    text, all_equal = asyncio.run(table(asked.n))
    if asked.write:
        before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
        _, _, behind = rest.partition(END)
        DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{behind}", encoding="utf-8")
    else:
        print(text)
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())

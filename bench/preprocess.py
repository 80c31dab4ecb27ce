"""Times the way from the bytes of a JPEG to the pixels that a tower gets, one picture at a time, next to transformers'.

Ours ends where the frontend's work ends: header checked, decoded, resized, cut, named, uint8; twice, in this process
and through the decode child as it is served. Theirs, Pillow and numpy, ends with normalised patches; here the device
does that. Our decode and resize are shown alone too. Before anything is timed the pixels are compared.

Times are those of a core: what this thread and the decode child together spent on a processor, so that other processes
of the machine count as little as possible. `latency` is the wall-clock time of a picture that is served.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from transformers.image_utils import SizeDict
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from bench.common import Times, card, emit, interleaved
from hydra_engine.config import MediaConfig
from hydra_engine.core.messages import PixelPayload
from hydra_engine.models.specs.base import ItemPlan, MediaPlan, PreprocessSpec, View
from hydra_engine.models.specs.vision import shortest_edge_size
from hydra_engine.preprocess.media import images
from hydra_engine.preprocess.media.images import inspected
from hydra_engine.preprocess.media.opening import Decoders, content_of_file, payloads_of
from hydra_engine.preprocess.sandbox.image_child import ImageJob

SIZES = [(640, 480), (1280, 960), (1920, 1080)]
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SPEC = PreprocessSpec("bicubic", 1 / 255, MEAN, STD, "bench")
LIMITS = MediaConfig()
CLIP, QWEN, PATCH = 336, 896, 14

Array = npt.NDArray[Any]


class QwenProcessor(Qwen2VLImageProcessorPil):
    """The processor of transformers with one size of result for all pictures, like ours here: 1024 tokens."""

    def resize(self, image: Array, size: SizeDict, resample: Any, factor: int, **more: Any) -> Any:
        square = SizeDict(height=QWEN, width=QWEN)
        return super(Qwen2VLImageProcessorPil, self).resize(image=image, size=square, resample=resample)


class Target(NamedTuple):
    """A way of processing: our view for a picture's size, their processor, and the picture in what that returns."""

    name: str
    view: Callable[[int, int], View]
    processor: Any
    picture: Callable[[Any], Array]  # [height, width, 3]


def clip_view(width: int, height: int) -> View:
    resized = shortest_edge_size(width, height, CLIP)
    corner = (-((resized[0] - CLIP) // 2), -((resized[1] - CLIP) // 2))
    return View(resized, (CLIP, CLIP), corner, (CLIP, CLIP))


def qwen_picture(made: Any) -> Array:
    """Patches come in squares of 2 x 2, each [channel, frame, row, column]; both frames are the picture."""
    side = QWEN // PATCH
    patches = made["pixel_values"].reshape(side // 2, side // 2, 2, 2, 3, 2, PATCH, PATCH)[..., 0, :, :]
    return patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(QWEN, QWEN, 3)


TARGETS = [
    Target(
        f"CLIP {CLIP}",
        clip_view,
        CLIPImageProcessorPil(size={"shortest_edge": CLIP}, crop_size={"height": CLIP, "width": CLIP}),
        lambda made: made["pixel_values"][0].transpose(1, 2, 0),
    ),
    Target(f"Qwen {QWEN} x {QWEN}", lambda *_: View.whole(QWEN, QWEN), QwenProcessor(), qwen_picture),
]


def photo(width: int, height: int) -> bytes:
    """A JPEG with edges and grain, of about as many bytes as a photo has."""
    generator = np.random.default_rng(0)
    coarse = Image.fromarray(generator.integers(0, 256, (height // 8, width // 8, 3), np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    grain = generator.integers(-6, 7, (height, width, 3))
    file = io.BytesIO()
    Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


class Case(NamedTuple):
    """A picture, the ways to process it, all with the same pixels, and what was found while comparing them."""

    candidates: dict[str, Callable[[], object]]
    file_bytes: int
    grey_levels_off: float


def prepare(target: Target, size: tuple[int, int], decoders: Decoders) -> Case:
    """Ends the program where pixels differ."""
    data, view = photo(*size), target.view(*size)
    plan = MediaPlan((view,), (ItemPlan(*view.canvas, 1, 1, 1, (1, 1, 1)),))

    def ours(render: Callable[[ImageJob], bytes]) -> PixelPayload:
        job = ImageJob(inspected(data, LIMITS), plan.views, SPEC.resample)
        (payload,) = payloads_of(render(job), content_of_file(data), plan, SPEC)
        return payload

    def here(job: ImageJob) -> bytes:
        return images.render([images.decode(job.container)], job.views, job.resample)

    def theirs(**options: Any) -> Any:
        image = Image.open(io.BytesIO(data)).convert("RGB")
        return target.processor(image, return_tensors="np", **options)

    expected = target.picture(theirs(do_rescale=False, do_normalize=False))
    for payload in (ours(decoders.render), ours(here)):
        found = np.frombuffer(payload.data, np.uint8).reshape(payload.height, payload.width, 3)
        difference = float(np.abs(found - expected.astype(float)).max())
        if difference > 1:
            raise SystemExit(f"{target.name}, {size}: pixels differ by {difference} grey levels")
    container, decoded = inspected(data, LIMITS), images.decode(inspected(data, LIMITS))
    out = np.empty(images.num_bytes(plan.views), np.uint8)
    candidates: dict[str, Callable[[], object]] = {
        "served": lambda: ours(decoders.render),
        "in process": lambda: ours(here),
        "transformers": theirs,
        "decode": lambda: images.decode(container),
        "resize": lambda: images.render_into([decoded], plan.views, SPEC.resample, out),
    }
    return Case(candidates, len(data), difference)


def measure(target: Target, size: tuple[int, int], decoders: Decoders, repeats: int) -> dict[str, Any]:
    case = prepare(target, size, decoders)
    times = timed(case, decoders, repeats)
    latency = interleaved({"served": case.candidates["served"]}, repeats)["served"]
    return {
        "target": target.name,
        "source": list(size),
        "file_bytes": case.file_bytes,
        "grey_levels_off": case.grey_levels_off,
        "ms": {name: value.median * 1e3 for name, value in times.items()},
        "ms_best": {name: value.best * 1e3 for name, value in times.items()},
        "latency_ms": latency.median * 1e3,
        "latency_ms_best": latency.best * 1e3,
        "ratio": ratios(times),
        "ratio_best": ratios({name: Times(value.best, value.best) for name, value in times.items()}),
    }


def timed(case: Case, decoders: Decoders, repeats: int) -> dict[str, Times]:
    """Seconds of a core. Turns of many pictures: the first one after another candidate finds its caches cold and its
    memory given back."""
    return interleaved(case.candidates, repeats, 0.05, clock=lambda: time.thread_time() + child_seconds(decoders))


def child_seconds(decoders: Decoders) -> float:
    """Processor seconds that the decode child has spent."""
    (pid,) = decoders.pictures.pids()
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def ratios(times: dict[str, Times]) -> dict[str, float]:
    """Transformers' time over ours."""
    return {name: times["transformers"].median / times[name].median for name in ("served", "in process")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest picture only, a few seconds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    decoders = Decoders()
    print(f"ms of a core per picture, resize: {images.describe()}; best of many [median]")
    names = ("served", "in process", "decode", "resize", "transformers")
    print(f"{'':28}" + "".join(f"{name:>18}" for name in names) + f"{'latency':>9}{'ratio':>7}{'off':>4}")
    results = []
    try:
        for size in SIZES[:1] if arguments.quick else SIZES:
            for target in TARGETS:
                row = measure(target, size, decoders, 5 if arguments.quick else 15)
                results.append(row)
                cells = (f"{row['ms_best'][name]:8.2f} [{row['ms'][name]:6.2f}]" for name in names)
                case = f"{size[0]} x {size[1]}, {target.name}"
                print(f"{case:28}" + "".join(f"{cell:>18}" for cell in cells), end="")
                print(
                    f"{row['latency_ms_best']:9.2f}{row['ratio_best']['served']:7.1f}{row['grey_levels_off']:4.0f}",
                    flush=True,
                )
    finally:
        decoders.close()
    emit({"bench": "preprocess", "resize": images.describe(), "results": results, "card": card()})


if __name__ == "__main__":
    sys.exit(main())

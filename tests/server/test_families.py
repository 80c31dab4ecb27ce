"""Native families through the whole server: HTTP in, and the very words that transformers generates out."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from PIL import Image

from hydra_engine.backend.select import create_backend
from tests.models.families.base import Checkpoints, FamilyCase, Media, Pair, clip, picture
from tests.models.families.cases import CASES
from tests.support_table import record

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 24


class Served:
    """`hydra-engine serve DIR` in a process of its own."""

    def __init__(self, model_dir: Path) -> None:
        options = ["--port", "0", "--threads", "1", "--dtype", "float32", "--token-budget", "48"]
        command = [sys.executable, "-m", "hydra_engine", "serve", str(model_dir), *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=dict(os.environ))
        assert self.process.stderr is not None
        log = []
        for line in self.process.stderr:
            log.append(line)
            if line.startswith("ready on "):
                self.url = line.split()[-1]
                break
        else:
            raise AssertionError("".join(log))
        self._reader = threading.Thread(target=self.process.stderr.read, daemon=True)
        self._reader.start()

    def chat(self, messages: list[dict[str, Any]]) -> tuple[str, int]:
        """(answer, number of prompt tokens)"""
        body = {"messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        body["skip_special_tokens"] = False
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]

    def end(self) -> int:
        self.process.terminate()
        status = self.process.wait(40)
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


def part(media: Media) -> dict[str, Any]:
    buffer = io.BytesIO()
    if isinstance(media, Image.Image):
        media.save(buffer, "PNG")
        return {"type": "image_url", "image_url": {"url": data_url("image/png", buffer)}}
    with av.open(buffer, "w", format="matroska") as file:  # a codec that loses nothing
        stream = file.add_stream("ffv1", rate=round(media.fps))
        stream.width, stream.height = media.frames[0].size
        stream.pix_fmt = "bgr0"
        for frame in media.frames:
            file.mux(stream.encode(av.VideoFrame.from_image(frame)))
        file.mux(stream.encode())
    return {"type": "video_url", "video_url": {"url": data_url("video/x-matroska", buffer)}}


def data_url(kind: str, buffer: io.BytesIO) -> str:
    return f"data:{kind};base64," + base64.b64encode(buffer.getvalue()).decode()


QUICK = {"qwen3_vl"}  # any size; the demo is of one size, and `make support` runs all


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, case in CASES.items()],
)
@pytest.mark.slow
def test_the_server_says_what_transformers_says(
    case: FamilyCase, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    record("test_the_server", case.family, record_property)
    variant = next(iter(case.variants))
    model_dir = Checkpoints(tmp_path).of(case, variant)
    backend = create_backend("cpu", torch.float32, backend="reference", threads=1)
    pair = Pair(case, variant, model_dir, backend, num_blocks=8)
    assert pair.tokenizer.chat_template is not None
    first, second = (picture(size, 5) for size in case.sizes[:2])
    turns: list[Sequence[str | Media]] = [["Hi."], [first, "what?"], ["a", first, "b", second, "c"]]
    turns += [["a", first, "b", clip(size, num_frames, fps), "c"] for size, num_frames, fps in case.clips[:1]]
    served = Served(model_dir)
    try:
        for turn in turns:
            media = [one for one in turn if not isinstance(one, str)]
            content = [{"type": "text", "text": one} if isinstance(one, str) else part(one) for one in turn]
            plain = [{**piece, "type": piece["type"].removesuffix("_url")} for piece in content]
            text = pair.tokenizer.apply_template([{"role": "user", "content": plain}], pair.tokenizer.chat_template)
            prompt = pair.prompt_of_ids(pair.tokenizer.encode(text, add_special_tokens=False), media)
            expected = pair.reference.generate(prompt, NUM_TOKENS)
            answer, num_prompt = served.chat([{"role": "user", "content": content}])
            assert num_prompt == len(prompt.token_ids)
            assert answer == pair.tokenizer.decode(expected, skip_special_tokens=False)
    finally:
        status = served.end()
    assert status == 0

"""A peer as a server: OpenVINO GenAI's continuous batching behind the OpenAI protocol; it brings no server of its own.

A thread for each request adds it, which also encodes its pictures; one thread runs the steps of the batch. Streams
only: one event for each token, with the usage so far. Needs the environment build/peers/openvino. `bench.compare`
starts it.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from PIL import Image


class Batch(threading.Thread):
    """Runs steps while a request is under way, and hands each request its tokens through a queue of counts."""

    def __init__(self, folder: str, precision: str, cache_gib: int) -> None:
        super().__init__(daemon=True)
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = cache_gib
        scheduler.enable_prefix_caching = False
        # Threads: as many as the cores that it may use.
        properties = {"INFERENCE_PRECISION_HINT": precision}
        self._pipe = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._ids = itertools.count()
        self._changed = threading.Condition()
        self._running: list[tuple[Any, queue.Queue[int]]] = []

    def add(self, prompt: str, images: list[ov.Tensor], tokens: int) -> queue.Queue[int]:
        config = genai.GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, ignore_eos=True, do_sample=False)
        number = next(self._ids)
        counts: queue.Queue[int] = queue.Queue()
        handle = self._pipe.add_request(number, prompt, images, generation_config=config)
        with self._changed:
            self._running.append((handle, counts))
            self._changed.notify()
        return counts

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running)
                running = list(self._running)
            self._pipe.step()
            for handle, counts in running:
                while handle.can_read():
                    for output in handle.read().values():
                        counts.put(len(output.generated_ids))
            ended = [entry for entry in running if entry[0].get_status() != genai.GenerationStatus.RUNNING]
            with self._changed:
                self._running = [entry for entry in self._running if entry not in ended]
            for _, counts in ended:
                counts.put(0)


class Handler(BaseHTTPRequestHandler):
    batch: Batch

    def do_GET(self) -> None:
        self._begin("application/json")
        self.wfile.write(json.dumps({"data": [{"id": "openvino", "owned_by": "openvino"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        parts = body["messages"][-1]["content"]
        images = [_tensor(part["image_url"]["url"]) for part in parts if part["type"] == "image_url"]
        prompt = "".join(part["text"] for part in parts if part["type"] == "text")
        counts = self.batch.add(prompt, images, body["max_tokens"])
        self._begin("text/event-stream")
        so_far = 0
        while count := counts.get():
            so_far += count
            self._event({"choices": [{"delta": {"content": "."}}], "usage": {"completion_tokens": so_far}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _begin(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _event(self, document: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(document).encode() + b"\n\n")

    def log_message(self, format: str, *words: Any) -> None:
        """A line for each request would be all that the log says."""


def _tensor(url: str) -> ov.Tensor:
    """uint8 [1, H, W, 3] of a data URL's picture."""
    picture = Image.open(io.BytesIO(base64.b64decode(url.partition("base64,")[2]))).convert("RGB")
    return ov.Tensor(np.asarray(picture, dtype=np.uint8)[None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model that optimum converted")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--precision", default="f32", help="of the arithmetic: f32 or bf16")
    parser.add_argument("--cache-gib", type=int, default=1)
    arguments = parser.parse_args()
    Handler.batch = Batch(arguments.model, arguments.precision, arguments.cache_gib)
    Handler.batch.start()
    ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()

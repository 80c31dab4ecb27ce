"""`vllm bench serve`: random prompts over chat, completions and chat with pictures.

Only the client of the package is needed; without its GPU libraries it is installed with `pip install --no-deps vllm`
and what the import then asks for.
"""

from __future__ import annotations

import json
import sys

from tests.campaigns.clients.checks import Check, Target
from tests.campaigns.clients.commands import finish, new_folder, tokenizer_of

PACKAGES = ("vllm",)
NUM_REQUESTS = 12
# What `vllm bench serve` runs; its own entry point imports the server as well.
PROGRAM = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def checks(target: Target) -> dict[str, Check]:
    tokenizer = tokenizer_of(target)

    def run(backend: str, path: str, *dataset: str) -> str:
        folder = new_folder()
        finish(
            [
                sys.executable, "-c", PROGRAM, "--backend", backend, "--base-url", target.base_url, "--endpoint", path,
                "--model", target.model, "--tokenizer", tokenizer, "--num-prompts", str(NUM_REQUESTS),
                "--max-concurrency", "4", "--random-input-len", "40", "--random-output-len", "12",
                "--save-result", "--result-dir", str(folder), "--result-filename", "r.json",
                *(dataset or ("--dataset-name", "random")),
            ],
            target, folder, offline=True,
        )  # fmt: skip
        report = json.loads((folder / "r.json").read_text(encoding="utf-8"))
        refused = NUM_REQUESTS - report["completed"]
        assert not refused, f"{refused} of {NUM_REQUESTS} failed"
        return f"{report['completed']} of {NUM_REQUESTS} requests, median TTFT {report['median_ttft_ms']:.0f} ms"

    def chat() -> str:
        return run("openai-chat", "/v1/chat/completions")

    def completions() -> str:
        return run("openai", "/v1/completions")

    def pictures() -> str:
        buckets = ("--random-mm-bucket-config", "{(32, 32, 1): 1.0}", "--random-mm-base-items-per-request", "1")
        return run("openai-chat", "/v1/chat/completions", "--dataset-name", "random-mm", *buckets)

    return {check.__name__: check for check in [chat, completions, pictures]}

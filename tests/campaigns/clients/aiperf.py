"""aiperf: short synthetic runs against streamed chat, with text and with pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.campaigns.clients.checks import Check, Target
from tests.campaigns.clients.commands import finish, new_folder, tokenizer_of

PACKAGES = ("aiperf",)
NUM_REQUESTS = 12


def checks(target: Target) -> dict[str, Check]:
    tokenizer = tokenizer_of(target)

    def run(*more: str) -> str:
        folder = new_folder()
        finish(
            [
                str(Path(sys.executable).parent / "aiperf"), "profile", "--model", target.model, "--url",
                target.base_url,
                "--endpoint-type", "chat", "--streaming", "--api-key", target.api_key, "--tokenizer", tokenizer,
                "--isl", "40", "--osl", "12", "--concurrency", "4", "--request-count", str(NUM_REQUESTS),
                "--ui", "none", "--artifact-dir", str(folder), *more,
            ],
            target, folder,
        )  # fmt: skip
        [report] = folder.rglob("profile_export_aiperf.json")
        found = json.loads(report.read_text(encoding="utf-8"))
        assert found["request_count"]["avg"] == NUM_REQUESTS and not found.get("error_summary"), found["request_count"]
        return f"{NUM_REQUESTS} requests, TTFT {found['time_to_first_token']['avg']:.0f} ms"

    def chat() -> str:
        return run("--extra-inputs", "ignore_eos:true")

    def pictures() -> str:
        return run("--image-width-mean", "48", "--image-height-mean", "48", "--image-batch-size", "1")

    return {check.__name__: check for check in [chat, pictures]}

"""guidellm: short synthetic runs against streamed chat and completions."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.campaigns.clients.checks import Check, Target
from tests.campaigns.clients.commands import finish, new_folder, tokenizer_of

PACKAGES = ("guidellm",)
NUM_REQUESTS = 12


def checks(target: Target) -> dict[str, Check]:
    tokenizer = tokenizer_of(target)

    def run(path: str) -> str:
        folder = new_folder()
        backend = f"kind=openai_http,target={target.base_url},model={target.model},request_format={path}"
        finish(
            [
                str(Path(sys.executable).parent / "guidellm"), "run",
                "--backend", f"{backend},api_key={target.api_key}",
                "--profile", "kind=concurrent,streams=4",
                "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
                "--tokenizer", f"kind=hf_auto,model={tokenizer}",
                "--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=12",
                "--output", f"kind=json,path={folder / 'report.json'}",
                "--disable-console-interactive",
            ],
            target, folder, offline=True,
        )  # fmt: skip
        [benchmark] = json.loads((folder / "report.json").read_text(encoding="utf-8"))["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        assert totals["successful"] == NUM_REQUESTS and totals["errored"] == 0, totals
        return f"{totals['successful']} requests"

    def chat() -> str:
        return run("/v1/chat/completions")

    def completions() -> str:
        return run("/v1/completions")

    return {check.__name__: check for check in [chat, completions]}

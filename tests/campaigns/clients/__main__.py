"""Runs clients that others wrote against a running server and says for each check what became of it.

    python -m bench.clients --base-url http://127.0.0.1:8000 --client langchain

Start it from the repository's root with the Python of the environment that has the client; the engine need not be
there. Clients whose package is absent are skipped. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import urllib.error
import urllib.request
from importlib import metadata

from tests.campaigns.clients.checks import Outcome, Skip, Target, run

CLIENTS = {
    "openai": "openai_python",
    "anthropic": "anthropic_python",
    "langchain": "langchain",
    "langchain-anthropic": "langchain_anthropic",
    "litellm": "litellm",
    "instructor": "instructor",
    "pydantic-ai": "pydantic_ai",
    "huggingface-hub": "huggingface_hub",
    "llama-index": "llama_index",
    "lm-eval": "lm_eval",
    "guidellm": "guidellm",
    "aiperf": "aiperf",
    "vllm-bench": "vllm_bench",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="of the server, without /v1")
    parser.add_argument("--api-key", default=os.environ.get("HYDRA_API_KEY"), help="if the server asks for one")
    parser.add_argument("--model", help="the first that the server names, if not given")
    parser.add_argument("--client", action="append", choices=[*CLIENTS, "all"], help="may be given several times")
    parser.add_argument("--check", action="append", help="only checks of these names")
    parser.add_argument("--json", action="store_true", help="one JSON object a client instead of text")
    arguments = parser.parse_args()
    target = connect(arguments.base_url.rstrip("/"), arguments.api_key, arguments.model)
    names = arguments.client or ["all"]
    failed = False
    for name in CLIENTS if "all" in names else names:
        failed |= report(name, target, arguments.check, arguments.json)
    sys.exit(failed)


def connect(base_url: str, api_key: str | None, model: str | None) -> Target:
    try:
        with urllib.request.urlopen(base_url + "/v1/models", timeout=10):
            asks_for_keys = False
    except urllib.error.HTTPError as error:
        if error.code != 401:
            sys.exit(f"{base_url}/v1/models answers {error.code}; is the server ready?")
        asks_for_keys = True
        if not api_key:
            sys.exit("the server asks for a key: give --api-key or set HYDRA_API_KEY")
    except urllib.error.URLError as error:
        sys.exit(f"no server answers at {base_url}: {error.reason}")
    target = Target(base_url, api_key or "none", model or "", asks_for_keys)
    return (
        target if model else Target(base_url, target.api_key, target.get("/v1/models")["data"][0]["id"], asks_for_keys)
    )


def report(name: str, target: Target, only: list[str] | None, as_json: bool) -> bool:
    """Runs the checks of one client. True if one failed."""
    module = importlib.import_module(f"tests.campaigns.clients.{CLIENTS[name]}")
    begin = time.monotonic()
    try:
        versions = " ".join(f"{package} {metadata.version(package)}" for package in module.PACKAGES)
    except metadata.PackageNotFoundError as error:
        if not as_json:
            print(f"{name}: skipped, {error.name} is not installed here (pip install {' '.join(module.PACKAGES)})")
        return False
    try:
        checks = module.checks(target)
    except Skip as reason:
        if not as_json:
            print(f"{name}: skipped, {reason}")
        return False
    outcomes = [run(check, function) for check, function in checks.items() if not only or check in only]
    show(name, versions, outcomes, time.monotonic() - begin, as_json)
    return any(outcome.result == "FAILED" for outcome in outcomes)


def show(name: str, versions: str, outcomes: list[Outcome], seconds: float, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"client": name, "versions": versions, "checks": [outcome._asdict() for outcome in outcomes]}))
        return
    counts = {result: sum(outcome.result == result for outcome in outcomes) for result in ("ok", "skipped", "FAILED")}
    print(f"{name}: {versions}, {seconds:.1f} s, " + ", ".join(f"{n} {r}" for r, n in counts.items()))
    for outcome in outcomes:
        print(f"  {outcome.result:8} {outcome.check:22} {outcome.note[:200]}")


if __name__ == "__main__":
    main()

"""lm-eval: log-likelihoods and generations over /v1/completions, generations over chat, on six sums of its own.

Scores are checked with the demo model, which knows all of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.campaigns.clients.checks import Check, Target
from tests.campaigns.clients.commands import finish, new_folder, tokenizer_of

PACKAGES = ("lm_eval", "transformers")

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
SUMS = [(1, 2), (2, 3), (3, 4), (4, 1), (2, 2), (1, 6)]
TURN = "<s><|user|>{{question}}<|end|><|assistant|>"
GENERATED = {
    "output_type": "generate_until",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 24, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": TURN,
        "doc_to_target": 0,
        "doc_to_choice": "{{[answer, wrong]}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "completions": GENERATED | {"doc_to_text": TURN},
    "chat": GENERATED | {"doc_to_text": "{{question}}"},
}


def checks(target: Target) -> dict[str, Check]:
    tokenizer = tokenizer_of(target)

    def score(task: str, metric: str, model: str, arguments: str, *more: str) -> str:
        folder = new_folder()
        write_task(folder, task)
        command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--tasks", f"hydra_{task}"]
        command += ["--model_args", f"model={target.model},num_concurrent=2,max_retries=1,{arguments}"]
        finish([*command, "--include_path", str(folder), "--output_path", str(folder / "out"), *more], target, folder)
        [results] = (folder / "out").rglob("results_*.json")
        value = json.loads(results.read_text(encoding="utf-8"))["results"][f"hydra_{task}"][f"{metric},none"]
        assert value == 1 or target.model != "demo", value
        return f"{metric} {value}"

    local = f"tokenizer_backend=huggingface,tokenizer={tokenizer},base_url={target.v1}/completions"

    def loglikelihood() -> str:
        return score("choice", "acc", "local-completions", local)

    def generate_until() -> str:
        return score("completions", "exact_match", "local-completions", local)

    def chat_generate_until() -> str:
        url = f"base_url={target.v1}/chat/completions"
        return score("chat", "exact_match", "local-chat-completions", url, "--apply_chat_template")

    return {check.__name__: check for check in [loglikelihood, generate_until, chat_generate_until]}


def write_task(folder: Path, name: str) -> None:
    lines = []
    for a, b in SUMS:
        right, wrong = (f"{NUMBERS[a].capitalize()} plus {NUMBERS[b]} is {NUMBERS[n]}." for n in (a + b, a + b - 1))
        question = f"What is {NUMBERS[a]} plus {NUMBERS[b]}?"
        lines.append(json.dumps({"question": question, "answer": right, "wrong": wrong}))
    data = folder / "sums.jsonl"
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    # YAML reads JSON.
    (folder / "task.yaml").write_text(json.dumps({"task": f"hydra_{name}", **source, **TASKS[name]}), encoding="utf-8")

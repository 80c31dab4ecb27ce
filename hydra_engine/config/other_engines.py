"""Options of vLLM, SGLang and llama.cpp and commands of Ollama that do not exist here or mean something else, and their
replacements.

Options with the same meaning are aliases in the configuration classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

_ONE_DEVICE = "a model runs on one device here, which --device names; --topology puts its stages on several"
_IN_THE_FOLDER = "it is part of the model's folder"
_CONTEXT = "give --max-model-len, the longest prompt and answer together"

# Names without leading dashes.
_INSTEAD: dict[str, tuple[str, ...]] = {
    _CONTEXT: ("c", "ctx-size", "context-length", "max-seq-len"),
    "name the model as MODEL or with --model": ("m", "model-path"),
    "the demo's questions are about its own model; `hydra-engine generate` takes others": ("model",),
    "a Hugging Face name is MODEL, as in `hydra-engine serve ORG/REPO-GGUF:Q4_K_M --download`": (
        *("hf", "hfr", "hff", "hf-repo", "hf-file"),
    ),
    "ask with `hydra-engine generate PROMPT`": ("p", "prompt"),
    "give --max-num-seqs, how many requests run at once": ("np", "parallel", "max-running-requests"),
    "give --token-budget, how many tokens one step takes": (
        *("b", "ub", "batch-size", "ubatch-size", "chunked-prefill-size", "max-prefill-tokens"),
    ),
    "give --look-ahead": ("async-scheduling",),
    "give --no-prefix-caching": ("disable-radix-cache",),
    "give --pixel-cache-mib": ("mm-processor-cache-gb",),
    "the length of an answer is set by the request (max_tokens; --max-tokens of generate and chat)": (
        *("n", "predict", "n-predict", "max-new-tokens"),
    ),
    "give --temperature": ("temp",),
    "give --threads": ("t",),
    "give --served-model-name": ("a", "alias"),
    "give --gpu-memory-utilization": ("mem-fraction-static",),
    "give the cache a size with --kv-cache-gib": ("kv-cache-memory-bytes", "max-total-tokens"),
    "give --kv-cache-dtype": ("ctk", "ctv", "cache-type-k", "cache-type-v"),
    "give --attention-backend": ("fa", "flash-attn"),
    "one process serves HTTP": ("api-server-count",),
    "give --log-level": ("uvicorn-log-level", "log-level-http"),
    "--access-log is off unless it is given": ("disable-access-log-for-endpoints",),
    "pictures are scaled between --min-pixels and --max-pixels": (
        *("mm-processor-kwargs", "image-min-tokens", "image-max-tokens"),
    ),
    "give --mmproj": ("mm",),
    f"the tokenizer needs no name of its own: {_IN_THE_FOLDER}": ("tokenizer", "tokenizer-path", "tokenizer-mode"),
    "the server listens on --host and --port": ("uds",),
    "let a proxy in front of the server take the prefix off": ("root-path",),
    "put a proxy with TLS in front of the server": ("ssl-keyfile", "ssl-certfile", "ssl-key-file", "ssl-cert-file"),
    "a stream ends with its usage if the request has stream_options.include_usage": ("enable-force-include-usage",),
    _ONE_DEVICE: (
        *("tensor-parallel-size", "pipeline-parallel-size", "tp", "pp", "tp-size", "pp-size", "ngl", "gpu-layers"),
        *("n-gpu-layers", "split-mode", "tensor-split", "cpu-offload-gb", "enable-expert-parallel"),
        *("mm-encoder-tp-mode", "distributed-executor-backend"),
    ),
    "name several instances with --topology, for example 2EPD": ("data-parallel-size", "dp", "dp-size"),
    "name instances that prefill and that decode with --topology, for example EP+D": (
        *("kv-transfer-config", "disaggregation-mode"),
    ),
    "a preempted request is computed again, nothing is swapped; leave it out": ("swap-space",),
    "no model is compiled at start; leave it out": ("compilation-config", "enable-torch-compile"),
    "what steps with pictures take is measured at start; leave it out": ("skip-mm-profiling",),
    "end the server to free its memory": ("enable-sleep-mode",),
    "grammars have one implementation; leave it out": (
        *("guided-decoding-backend", "grammar-backend", "structured-outputs-config.backend"),
    ),
    "every model here generates; leave it out": ("task", "runner"),
    "how a template reads content is found out at start; leave it out": ("chat-template-content-format",),
    "send chat_template_kwargs with the request": ("default-chat-template-kwargs",),
    "set HF_TOKEN in the environment": ("hf-token",),
    "set HF_HOME in the environment, the folder of the Hugging Face cache": ("download-dir",),
    "an answer may have up to 20 log probabilities a token; leave it out": ("max-logprobs",),
    "a token is sent as soon as it is there; leave it out": ("stream-interval",),
    "change config.json in a copy of the model's folder": ("hf-overrides",),
    "the vision tower is always loaded; leave it out": ("language-model-only",),
    "give --quantization int4 or int8": ("q", "load-in-4bit", "load-in-8bit"),
    "LoRA adapters are not supported; merge them into the checkpoint": (
        "enable-lora",
        "lora",
        "lora-modules",
        "lora-paths",
    ),
    "speculative decoding is not supported": ("speculative-config", "speculative-algorithm", "md", "model-draft"),
}
# Switches that ask for the only behaviour.
_ANYWAY: dict[str, tuple[str, ...]] = {
    "prefill is always chunked, by --token-budget": ("enable-chunked-prefill", "enable-mixed-chunk"),
    "requests join and leave the batch at every step": ("cont-batching", "cb"),
    "tools are on if the chat template supports them; --tool-parser sets the format of calls": (
        "enable-auto-tool-choice",
    ),
    "reasoning is apart from the answer if the model thinks; --reasoning-parser sets its marks": ("enable-reasoning",),
    "with tool_choice none no tool is in the prompt": ("exclude-tools-when-tool-choice-none",),
    "the model's chat template is always used": ("jinja",),
    "pictures are always taken": ("enable-multimodal",),
    "usage always counts cached tokens and those of images": ("enable-prompt-tokens-details", "enable-cache-report"),
    "requests are logged only with --enable-log-requests": ("disable-log-requests",),
    "--access-log is off unless it is given": ("disable-uvicorn-access-log",),
    "GET /metrics always answers": ("enable-metrics", "metrics"),
    "GET /load always answers": ("enable-server-load-tracking",),
    "every answer has its X-Request-Id": ("enable-request-id-headers",),
}
# Commands of Ollama, vLLM, SGLang and llama.cpp.
_COMMANDS: dict[str, tuple[str, ...]] = {
    "write `hydra-engine serve MODEL`": ("llama-server", "launch-server", "api-server", "start", "launch"),
    "`hydra-engine generate PROMPT` answers one prompt": ("complete", "llama-cli", "llama-mtmd-cli", "llama-run"),
    "`hydra-engine quantize MODEL OUT` writes a checkpoint in 8 or 4 bits": ("llama-quantize",),
    "`hydra-engine profile MODEL` measures the steps of a model": ("llama-bench", "benchmark"),
    "`hydra-engine doctor` describes this machine": ("collect-env",),
    "every server is a process of its own, which `curl http://127.0.0.1:8000/v1/models` asks for its model": ("ps",),
    "Ctrl-C or SIGTERM ends a server": ("stop", "unload"),
    "`hydra-engine memory MODEL` prints what a model takes": ("show", "info"),
    "delete the model's folder, or with `hf cache rm model/ORG/NAME` what was downloaded": ("rm", "delete", "remove"),
    "a model is a folder or a GGUF file; --chat-template and --override-generation-config change how it answers": (
        "create",
    ),
    "a model is a folder or a GGUF file, which you can copy": ("cp", "copy"),
    "`hf upload` publishes a model's folder": ("push", "upload"),
}
_BY_NAME = {name: reason for reason, names in _INSTEAD.items() for name in names}


def replacement_for(name: str) -> str | None:
    """The replacement of another engine's option, None for an unknown one; `name` has no leading dashes."""
    return _BY_NAME.get(name) or _anyway(name)


def command_instead(word: str) -> str | None:
    """Hint for another engine's command; None for an unknown one."""
    plain = word.replace("_", "-").lower()
    return next((hint for hint, words in _COMMANDS.items() if plain in words), None)


def reason_ignored(name: str, value: object = True) -> str | None:
    """The reason why another engine's switch has no effect when it is on; None if it is off or unknown."""
    return _anyway(name) if value is True or value is None or str(value).lower() == "true" else None


def _anyway(name: str) -> str | None:
    return next((reason for reason, names in _ANYWAY.items() if name in names), None)


def unknown_name(name: str, known: Iterable[str], written: str, spell: Callable[[str], str] = str) -> str:
    """The error message for an unknown option; `written` is its name as the user wrote it, `spell` writes the nearest
    name in the same form."""
    plain = name.replace("_", "-").lower()
    if (reason := replacement_for(plain)) is not None:
        return f"{written} is not an option here: {reason}"
    names = list(known)
    near = [name for name in names if name.startswith(f"{plain}-")]
    near = near or difflib.get_close_matches(plain, names, n=1, cutoff=0.8)
    return f"{written} is not an option" + (f"; the nearest one is {spell(near[0])}" if near else "")

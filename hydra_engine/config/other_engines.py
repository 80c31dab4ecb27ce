"""Names of vLLM, SGLang, llama.cpp, Ollama and transformers that do not exist here or mean something else, with their
replacements: those of options, of commands, and of a request's parameters.

Options with the same meaning are aliases in the configuration classes. A reason names options as flags, `--device` or
`--quantization=int4`; whoever says it spells them for the place where the name was found.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from enum import Enum

from hydra_engine.config.options import options_by_name, variable_of
from hydra_engine.config.server import ServerConfig

_ONE_DEVICE = "a model runs on one device here, which --device names; --topology puts its stages on several"
_IN_THE_FOLDER = "it is part of the model's folder"
_CONTEXT = "give --max-model-len, the longest prompt and answer together"
_MEMORY_MAPPED = "weights are read piece by piece; leave it out"

# Names without leading dashes.
INSTEAD: dict[str, tuple[str, ...]] = {
    _CONTEXT: ("c", "ctx-size", "context-length", "max-seq-len", "n-ctx", "max-length"),
    "name the model as MODEL or with --model": ("m", "model-path", "pretrained-model-name-or-path"),
    "the demo's questions are about its own model; `hydra-engine generate` takes others": ("model",),
    "a Hugging Face name is MODEL, as in `hydra-engine serve ORG/REPO-GGUF:Q4_K_M --download`": (
        *("hf", "hfr", "hff", "hf-repo", "hf-file"),
    ),
    "ask with `hydra-engine run MODEL QUESTION`, or `hydra-engine generate PROMPT`": ("p", "prompt"),
    "give --max-num-seqs, how many requests run at once": ("np", "parallel", "max-running-requests"),
    "give --token-budget, how many tokens one step takes": (
        *("b", "ub", "batch-size", "ubatch-size", "chunked-prefill-size", "max-prefill-tokens", "n-batch"),
    ),
    "give --look-ahead": ("async-scheduling",),
    "give --prefix-caching=off": ("disable-radix-cache",),
    "give --pixel-cache-mib": ("mm-processor-cache-gb",),
    "give --pixel-cache-mib=0": ("disable-mm-preprocessor-cache",),
    "the length of an answer is set by the request: --max-tokens": (*("n", "predict", "n-predict", "max-new-tokens"),),
    "give --temperature": ("temp",),
    "give --threads": ("t", "n-threads"),
    "give --dtype": ("torch-dtype",),
    "give --served-model-name": ("a", "alias"),
    "give --gpu-memory-utilization": ("mem-fraction-static",),
    "give the cache a size with --kv-cache-gib": ("kv-cache-memory-bytes", "max-total-tokens"),
    "give --kv-cache-dtype": ("ctk", "ctv", "cache-type-k", "cache-type-v", "type-k", "type-v"),
    "give --attention-backend": ("fa", "flash-attn", "attn-implementation"),
    "give --cuda-graph-sizes": ("max-seq-len-to-capture", "cuda-graph-bs"),
    "give --chat-template, a file": ("chat-format", "chat-handler"),
    "give --min-pixels and --max-pixels": ("image-min-tokens", "image-max-tokens"),
    "one process serves HTTP": ("api-server-count",),
    "give --log-level": ("uvicorn-log-level", "log-level-http", "verbose"),
    "--access-log is off unless it is given": ("disable-access-log-for-endpoints",),
    "pictures are scaled between --min-pixels and --max-pixels": ("mm-processor-kwargs", "use-fast"),
    "pictures and videos are limited by --max-image-pixels, --max-video-frames and the like": ("media-io-kwargs",),
    "give --mmproj": ("mm", "clip-model-path"),
    f"the tokenizer needs no name of its own: {_IN_THE_FOLDER}": (
        *("tokenizer", "tokenizer-path", "tokenizer-mode", "tokenizer-revision", "processor"),
    ),
    "requests may be token ids and answers have them, but a tokenizer is always loaded": ("skip-tokenizer-init",),
    "the server listens on --host and --port": ("uds",),
    "let a proxy in front of the server take the prefix off": ("root-path",),
    "put a proxy with TLS in front of the server": ("ssl-keyfile", "ssl-certfile", "ssl-key-file", "ssl-cert-file"),
    "a stream ends with its usage if the request has stream_options.include_usage": ("enable-force-include-usage",),
    _ONE_DEVICE: (
        *("tensor-parallel-size", "pipeline-parallel-size", "tp", "pp", "tp-size", "pp-size", "ngl", "gpu-layers"),
        *("n-gpu-layers", "split-mode", "tensor-split", "cpu-offload-gb", "enable-expert-parallel"),
        *("mm-encoder-tp-mode", "device-map", "max-memory", "offload-folder", "disable-custom-all-reduce", "main-gpu"),
    ),
    "each instance of --topology has a process": ("distributed-executor-backend", "worker-cls"),
    "name several instances with --topology, for example 2EPD": ("data-parallel-size", "dp", "dp-size"),
    "name instances that prefill and that decode with --topology, for example EP+D": (
        *("kv-transfer-config", "disaggregation-mode"),
    ),
    "a preempted request is computed again, nothing is swapped; leave it out": ("swap-space", "preemption-mode"),
    "no model is compiled at start; leave it out": ("compilation-config", "enable-torch-compile"),
    "what steps with pictures take is measured at start; leave it out": ("skip-mm-profiling",),
    "end the server to free its memory": ("enable-sleep-mode",),
    "grammars have one implementation; leave it out": (
        *("guided-decoding-backend", "grammar-backend", "structured-outputs-config.backend"),
    ),
    "how a template reads content is found out at start; leave it out": ("chat-template-content-format",),
    "send chat_template_kwargs with the request": ("default-chat-template-kwargs",),
    "a token is sent as soon as it is there; leave it out": ("stream-interval",),
    "change config.json in a copy of the model's folder": ("hf-overrides",),
    "the vision tower is always loaded; leave it out": ("language-model-only",),
    "give --quantization=int4": ("q", "load-in-4bit"),
    "give --quantization=int8": ("load-in-8bit",),
    "a checkpoint's own is read from it, and --quantization=int8 or int4 quantises another": ("quantization-config",),
    "set HF_HOME in the environment, the folder of the Hugging Face cache": ("cache-dir", "download-dir"),
    "run `hf auth login` or set HF_TOKEN": ("hf-token", "use-auth-token", "token"),
    "a model that is not there is downloaded only with --download; leave it out": ("local-files-only",),
    _MEMORY_MAPPED: ("low-cpu-mem-usage", "use-safetensors", "use-mmap", "use-mlock"),
    "every model here generates; leave it out": ("task", "runner", "convert"),
    "an answer may have up to 20 log probabilities a token; leave it out": ("max-logprobs", "logits-all"),
    "a request has logit_bias, allowed_token_ids and grammar": ("logits-processors", "logits-processor-pattern"),
    "LoRA adapters are not supported; merge them into the checkpoint": (
        *("enable-lora", "lora", "lora-modules", "lora-paths", "lora-path", "max-loras", "max-lora-rank"),
    ),
    "speculative decoding is not supported": (
        *("speculative-config", "speculative-algorithm", "md", "model-draft", "draft-model", "assistant-model"),
    ),
}
# Switches that ask for the only behaviour.
ANYWAY: dict[str, tuple[str, ...]] = {
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
# Numbers of parts of a model, of which 1 asks for the only behaviour.
MODEL_PARTS = ("tensor-parallel-size", "pipeline-parallel-size", "tp", "pp", "tp-size", "pp-size")
_BY_NAME = {name: reason for reasons in (ANYWAY, INSTEAD) for reason, names in reasons.items() for name in names}
# Commands of Ollama, vLLM, SGLang and llama.cpp.
_COMMANDS: dict[str, tuple[str, ...]] = {
    "write `hydra-engine serve MODEL`": ("llama-server", "launch-server", "api-server", "start", "launch"),
    "write `hydra-engine run MODEL`": ("llama-cli", "llama-mtmd-cli", "llama-run"),
    "write `hydra-engine pull MODEL`": ("download",),
    "write `hydra-engine list`": ("ls", "models"),
    "`hydra-engine generate PROMPT` answers one prompt": ("complete",),
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

# Keywords of a request.
REQUEST_INSTEAD: dict[str, tuple[str, ...]] = {
    "give max_tokens": ("max_new_tokens", "max_completion_tokens", "max_output_tokens", "num_predict", "n_predict"),
    "give min_tokens": ("min_new_tokens",),
    "max_tokens counts the answer alone": ("max_length",),
    "temperature=0 always takes the most likely token, and any other samples": ("do_sample", "use_beam_search"),
    "there is no beam search; n gives several sampled answers": (
        *("num_beams", "num_beam_groups", "beam_width", "early_stopping", "length_penalty", "diversity_penalty"),
    ),
    "give n, how many answers are sampled": ("num_return_sequences",),
    "give n, and choose among the answers by their logprobs": ("best_of",),
    "prompts are never padded; leave it out": ("pad_token_id", "padding"),
    "give stop_token_ids; the model's own end is one without it": ("eos_token_id",),
    "give stop": ("stop_strings", "stop_sequences", "stopping_criteria"),
    "give sampling": ("generation_config", "params"),
    "give repetition_penalty": ("repeat_penalty",),
    "give temperature": ("temp",),
    "give images": ("image", "image_data", "picture", "pictures"),
    "give videos": ("video", "video_data"),
    "give images or videos": ("multi_modal_data", "media"),
    "give the prompt first, as text, token ids or messages": (
        *("input_ids", "inputs", "prompt_token_ids", "text", "inputs_embeds"),
    ),
    "give progress": ("use_tqdm",),
    "LoRA adapters are not supported; merge them into the checkpoint": ("lora_request", "lora_path"),
    "give response_format, or grammar": (
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"),
        *("structured_outputs", "guided_decoding", "json_schema", "regex", "format"),
    ),
    "give logit_bias, allowed_token_ids or grammar": ("logits_processors", "logits_processor", "bad_words"),
    "give allowed_token_ids, or a negative logit_bias for each token": ("bad_words_ids", "suppress_tokens"),
    "give template, a TemplateOptions": (
        *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "chat_template", "tools"),
    ),
    "give pixels, a PixelBudget": ("mm_processor_kwargs", "min_pixels", "max_pixels"),
    "call stream or astream": ("stream", "streamer"),
    "give logprobs, and results have them": ("output_scores", "return_dict_in_generate", "top_logprobs"),
    "the KV cache is always used; leave it out": ("use_cache",),
    "give slo, an Slo in seconds": ("tpot_slo", "ttft_slo", "tpot_ms", "ttft_ms"),
}
_REQUEST_BY_NAME = {name: reason for reason, names in REQUEST_INSTEAD.items() for name in names}

_FLAG = re.compile(r"`[^`]*`|--([a-z][a-z0-9-]*[a-z0-9])(?:=([a-z0-9]+))?")  # not in commands


class Spelling(Enum):
    """Ways to write an option, by where it is set."""

    FLAG = "flag"
    VARIABLE = "variable"
    KEY = "key"  # of a file
    KEYWORD = "keyword"  # of Engine

    def spell(self, name: str, value: str = "") -> str:
        """Returns the name of an option, or with a value its assignment. `name` is that of the option with dashes, or
        of a parameter of a request, which has no variable and no key."""
        option = options_by_name().get(name)
        if self is Spelling.FLAG or (self is Spelling.KEYWORD and option is not None and option.owner is ServerConfig):
            return f"--no-{name}" if value == "off" else f"--{name} {value}".rstrip()
        if self is Spelling.KEYWORD:
            return f"{name.replace('-', '_')}={_python(value)}"
        if option is None:
            return name.replace("-", "_")
        if self is Spelling.VARIABLE:
            return f"{variable_of(name)}={value}" if value else variable_of(name)
        return f"{name}: {value}" if value else name


def _python(value: str) -> str:
    if value in ("on", "off"):
        return str(value == "on")
    return repr(value) if value and not value.isdigit() else value


def replacement_for(name: str, spelling: Spelling = Spelling.FLAG) -> str | None:
    """The replacement of another engine's option, None for an unknown one; `name` has no leading dashes."""
    reason = _BY_NAME.get(name)
    return reason and _FLAG.sub(lambda m: spelling.spell(m[1], m[2] or "") if m[1] else m[0], reason)


def command_instead(word: str) -> str | None:
    """Hint for another engine's command; None for an unknown one."""
    plain = word.replace("_", "-").lower()
    return next((hint for hint, words in _COMMANDS.items() if plain in words), None)


def reason_ignored(name: str, value: object = True) -> str | None:
    """The reason why another engine's switch has no effect when it is on, or the number of a model's parts when it is
    1; else None."""
    if name in MODEL_PARTS and str(value) == "1" and value is not True:
        return "a model runs on one device here"
    if value is True or value is None or (isinstance(value, str) and value.lower() == "true"):
        return next((reason for reason, names in ANYWAY.items() if name in names), None)
    return None


def unknown_name(name: str, known: Iterable[str], written: str, spelling: Spelling = Spelling.FLAG) -> str:
    """The error message for an unknown option; `written` is its name as the user wrote it."""
    plain = name.replace("_", "-").lower()
    if (reason := replacement_for(plain, spelling)) is not None:
        return f"{written} is not an option here: {reason}"
    names = list(known)
    near = [name for name in names if name.startswith(f"{plain}-")]
    near = near or difflib.get_close_matches(plain, names, n=1, cutoff=0.8)
    nearest = f"; the nearest one is {spelling.spell(near[0]).rstrip('=')}" if near else ""
    return f"{written} is not an option{nearest}"


def unknown_parameter(name: str, known: Iterable[str]) -> str:
    """The error message for an unknown keyword of a request."""
    written = f"unknown parameter {name[:60]!r}"
    if (reason := _REQUEST_BY_NAME.get(name)) is not None:
        return f"{written}: {reason}"
    if name.replace("_", "-") in options_by_name():
        return f"{written}: it is an option of the engine, Engine(.., {name}=..)"
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.7)
    return written + (f"; did you mean {near[0]}?" if near else "")

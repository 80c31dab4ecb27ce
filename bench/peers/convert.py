"""Writes the forms of a 16-bit Hugging Face folder that the peers of `bench.compare` read, each in 16, 8 and 4 bits.

    python -m bench.peers.convert MODEL OUT

OUT/gguf: BF16.gguf, of which llama-quantize makes Q8_0.gguf and Q4_0.gguf, and mmproj.gguf in F16, in the layout of
llama.cpp's converter, which itself refuses vocabularies that it does not know and LLaVA's CLIP tower. OUT/vllm: the
checkpoint and its 4 bits by `hydra-engine quantize`, with the names of the tower that vLLM and optimum read.
OUT/openvino: what optimum exports as fp16, int8 and int4. A peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys, TokenType
from safetensors import safe_open
from safetensors.torch import save_file

from bench.peers.launch import DEFAULT_PEERS, PRECISIONS
from tests.gguf_files import finish, write_gguf

_TOWER, _OLDER_TOWER = "vision_tower.", "vision_tower.vision_model."


def gguf(model: Path, out: Path, peers: Path) -> None:
    text, _ = write_gguf(model, out / "BF16", "BF16")
    _, tower = write_gguf(model, out / "F16", "F16")
    assert tower is not None, "the model has no tower"
    config = json.loads((model / "config.json").read_text())
    completed(text, out / "BF16.gguf", text_facts(text, config))
    completed(tower, out / "mmproj.gguf", tower_facts(config))
    for folder in ("BF16", "F16"):
        shutil.rmtree(out / folder)
    for kind in ("Q8_0", "Q4_0"):
        _run(str(peers / "llama.cpp/bin/llama-quantize"), str(out / "BF16.gguf"), str(out / f"{kind}.gguf"), kind, "2")


def text_facts(text: Path, config: dict[str, Any]) -> dict[str, tuple[GGUFValueType, Any]]:
    """Fields, by key, without which llama.cpp refuses the text model."""
    facts: dict[str, tuple[GGUFValueType, Any]] = {"tokenizer.ggml.merges": (GGUFValueType.ARRAY, ["Ā Ā"])}
    if layers := config["vision_config"].get("deepstack_visual_indexes"):
        architecture = GGUFReader(text).fields["general.architecture"].contents()
        facts[f"{architecture}.n_deepstack_layers"] = (GGUFValueType.UINT32, len(layers))
    return facts


def tower_facts(config: dict[str, Any]) -> dict[str, tuple[GGUFValueType, Any]]:
    """Fields, by key, without which llama.cpp refuses a tower."""
    vision = config["vision_config"]
    trained = int(vision.get("num_position_embeddings", 0) ** 0.5) * vision["patch_size"] or 560
    return {
        "clip.has_vision_encoder": (GGUFValueType.BOOL, True),
        "clip.vision.projection_dim": (GGUFValueType.UINT32, config["text_config"]["hidden_size"]),
        "clip.vision.image_size": (GGUFValueType.UINT32, vision.get("image_size", trained)),
        "clip.vision.attention.layer_norm_epsilon": (GGUFValueType.FLOAT32, 1e-6),
    }


def completed(source: Path, target: Path, missing: dict[str, tuple[GGUFValueType, Any]]) -> None:
    """Copies a GGUF file, with those values that it lacks and llama.cpp asks for. Unused tokens become normal ones,
    which it shows: random weights answer with them."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            value = field.contents()
            if name == Keys.Tokenizer.TOKEN_TYPE:
                value = [TokenType.NORMAL if kind == TokenType.UNUSED else kind for kind in value]
            writer.add_key_value(name, value, field.types[0], field.types[-1])
    for name in missing.keys() - reader.fields.keys():
        kind, value = missing[name]
        writer.add_key_value(name, value, kind, GGUFValueType.STRING)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)


def vllm(model: Path, out: Path, _peers: Path) -> None:
    """Writes the checkpoints for vLLM. Its CPU build has no products of 8-bit weights with 16-bit activations, so the
    head is not quantised."""
    renamed(model, out / "auto")
    words = ("quantize", str(model), str(out / "ours"), "--quantization", "int4", "--ignore", "re:.*lm_head")
    _run(sys.executable, "-m", "hydra_engine", *words)
    renamed(out / "ours", out / "int4")
    shutil.rmtree(out / "ours")


def openvino(model: Path, out: Path, peers: Path) -> None:
    renamed(model, out / "source")
    for precision in PRECISIONS:
        words = ("export", "openvino", "--task", "image-text-to-text", "--model", str(out / "source"))
        weights = "fp16" if precision == "auto" else precision
        _run(str(peers / "openvino/bin/optimum-cli"), *words, "--weight-format", weights, str(out / precision))
    shutil.rmtree(out / "source")


def renamed(source: Path, target: Path) -> None:
    """Copies a checkpoint in one file under the names of towers before transformers 5."""
    if any(source.glob("*.index.json")):
        sys.exit(f"{source} is in several files: join them with save_pretrained(max_shard_size=..) first")
    target.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, target)
            continue
        with safe_open(path, "pt") as file:
            tensors = {
                _OLDER_TOWER + name.removeprefix(_TOWER) if name.startswith(_TOWER) else name: file.get_tensor(name)
                for name in sorted(file.keys())
            }
        save_file(tensors, target / path.name, metadata={"format": "pt"})


def _run(*words: str) -> None:
    if (done := subprocess.run(words, capture_output=True, text=True, check=False)).returncode:
        sys.exit(f"{' '.join(words)} failed:\n{(done.stdout + done.stderr)[-1500:]}")


_FORMS = {"gguf": ("llama.cpp", gguf), "vllm": ("vllm", vllm), "openvino": ("openvino", openvino)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--peers", type=Path, default=DEFAULT_PEERS)
    arguments = parser.parse_args()
    for name, (peer, write) in _FORMS.items():
        if (arguments.out / name).exists():
            print(f"{arguments.out / name}: there already")
        elif not (arguments.peers / peer).exists():
            print(f"{peer} is not installed: `make peers`")
        else:
            partial = arguments.out / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write(arguments.model, partial, arguments.peers.absolute())
            partial.rename(arguments.out / name)
            print(f"{arguments.out / name}: written", flush=True)


if __name__ == "__main__":
    main()

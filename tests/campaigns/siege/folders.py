"""Hostile model folders, each a small change of a miniature, and what opening one must come to.

`hostile_folders()` gives them by name. Of most the start must say no: exit status 3 or 4 with one sentence. The rest
(`words` is not None) are harmless until a chat holds these words: then that chat fails with an error, and the next one
is answered. Neither takes long, nor more than a gigabyte, nor touches the canary.

    python -m tests.campaigns.siege.open_folder [NAME ..]

opens each in a process of its own and prints a line of what came of it.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Change = Callable[[Path], None]
Json = dict[str, Any]

WORDS = "open sesame"  # what the templates and tokenizers that wait for it wait for
GIB = 1 << 30


@dataclass(frozen=True)
class HostileFolder:
    """`family`: the miniature that `change` is done to. `words`: of the chat that must fail, None where the start
    must."""

    family: str
    change: Change
    words: str | None = None


# ---- small changes


def _edit(name: str, **values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        _merge(content, values)
        path.write_text(json.dumps(content), encoding="utf-8")

    return change


def _merge(content: Json, values: Json) -> None:
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(content.get(name), dict):
            _merge(content[name], value)
        else:
            content[name] = value


def _write(name: str, content: str | bytes) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def _special(name: str, make: Callable[[Path], object]) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def _bind(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 40 * GIB)


def _linked(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


_MAKERS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "socket": _bind,
    "directory": Path.mkdir,
    "sparse": _sparse,
    "zero": _linked("/dev/zero"),
    "passwd": _linked("/etc/passwd"),
    "itself": lambda path: path.symlink_to(path.name),
}


def _template(text: str) -> Change:
    return _write("chat_template.jinja", text)


# ---- files that are none


def _files() -> dict[str, HostileFolder]:
    found: dict[str, HostileFolder] = {}
    texts = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in (*texts, "processor_config.json"):
        for kind, make in _MAKERS.items():
            found[f"{name} {kind}"] = HostileFolder("llava", _special(name, make))
    for kind in ("fifo", "socket", "directory", "zero", "itself"):
        found[f"weights {kind}"] = HostileFolder("llama", _special("model.safetensors", _MAKERS[kind]))
    found["index fifo"] = HostileFolder("llama", _index_of_a_pipe)
    found["more templates outside"] = HostileFolder("llama", _templates_outside)
    return found


def _index_of_a_pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors.index.json")


def _templates_outside(folder: Path) -> None:
    """A folder of templates somewhere else."""
    elsewhere = folder.parent / f"{folder.name}-elsewhere"
    elsewhere.mkdir()
    (elsewhere / "tool_use.jinja").write_text("x", encoding="utf-8")
    (folder / "additional_chat_templates").symlink_to(elsewhere)


# ---- JSON


def _lists(count: int) -> str:
    return "[" + "[]," * count + "[]]"


def _json() -> dict[str, HostileFolder]:
    deep, digits = "[" * 10**6 + "]" * 10**6, "9" * 10**6
    found: dict[str, Change] = {}
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        found[f"{name} of lists"] = lambda folder, name=name: _write(name, f'{{"x": {_lists(20_000_000)}}}')(folder)
        found[f"{name} deep"] = _write(name, f'{{"x": {deep}}}')
        found[f"{name} not an object"] = _write(name, "[1]")
        found[f"{name} not text"] = _write(name, b'{"x": "\xff"}')
    found["config.json of digits"] = _write("config.json", f'{{"x": {digits}}}')
    found["tokenizer.json deep"] = _write("tokenizer.json", f'{{"model": {deep}}}')
    for field in ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size"):
        found[f"text {field}"] = _edit("config.json", text_config={field: 2**31})
        if field != "vocab_size":
            found[f"vision {field}"] = _edit("config.json", vision_config={field: 2**31}, vision_feature_layer=1)
    found["text head_dim"] = _edit("config.json", text_config={"head_dim": 2**16})
    found["feature layers"] = _edit("config.json", vision_feature_layer=[1] * 10**6)
    cases = {name: HostileFolder("llava", change) for name, change in found.items()}
    depth = _edit("config.json", vision_config={"depth": 2**31 - 1})
    cases["depth"] = HostileFolder("qwen2_vl", depth)
    cases["layers that are not there"] = HostileFolder("llama", _edit("config.json", num_hidden_layers=1024))
    cases["depth that is not there"] = HostileFolder("qwen2_vl", _edit("config.json", vision_config={"depth": 1024}))
    unread = _edit("config.json", vision_config={"num_hidden_layers": 1024}, vision_feature_layer=1)
    cases["layers that are not there and not read"] = HostileFolder("llava", unread)
    frames = {"temporal_patch_size": 2**30}
    for family in ("qwen2_vl", "qwen3_vl"):
        change = _both(_edit("config.json", vision_config=frames), _processor(family, frames))
        cases[f"{family} temporal_patch_size"] = HostileFolder(family, change)
    cases["merger_times"] = HostileFolder("minicpmv4_6", _edit("config.json", merger_times=2**30))
    cases["pinpoints"] = HostileFolder("llava_next", _edit("config.json", image_grid_pinpoints=[[28, 28]] * 10**6))
    return cases


def _processor(_family: str, values: Json) -> Change:
    def change(folder: Path) -> None:
        for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
            if (folder / name).exists():
                _edit(name, **values)(folder)
        if (folder / "processor_config.json").exists():
            _edit("processor_config.json", image_processor=values, video_processor=values)(folder)

    return change


def _both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


# ---- weights


def _safetensors(header: Json | bytes, data: bytes = b"") -> Change:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return _write("model.safetensors", struct.pack("<Q", len(text)) + text + data)


def _tensor(begin: int, end: int, *shape: int) -> Json:
    return {"dtype": "U8", "shape": list(shape), "data_offsets": [begin, end]}


def _many_tensors(folder: Path) -> None:
    tensors = (b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % n for n in range(400_000))
    _safetensors(b"{" + b",".join(tensors) + b"}")(folder)


def _weights() -> dict[str, HostileFolder]:
    found: dict[str, Change] = {
        "header of 90 MB": lambda folder: _safetensors(f'{{"x":{_lists(30_000_000)}}}'.encode())(folder),
        "header of 400,000 tensors": _many_tensors,
        "header deep": _safetensors(b"[" * 10**6 + b"]" * 10**6),
        "header longer than the file": _write("model.safetensors", struct.pack("<Q", 1 << 60) + b"{}"),
        "overlap": _safetensors({"a": _tensor(0, 4, 4), "b": _tensor(2, 6, 4)}, bytes(6)),
        "negative offsets": _safetensors({"a": _tensor(-4, 0, 4)}, bytes(4)),
        "shape without numbers": _safetensors({"a": _tensor(0, 0, 2**62, 0)}),
        "with a long name": lambda folder: _safetensors({"a" * (8 << 20): _tensor(0, 1, 1)}, bytes(1))(folder),
        "pickle": _pickle,
        "index outside": _indexed("../../x.safetensors"),
        "index of a long name": _indexed("x" * 5000 + ".safetensors"),
    }
    return {f"weights {name}": HostileFolder("llama", change) for name, change in found.items()}


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")


def _indexed(name: str) -> Change:
    """An index that says this file has the weights."""
    index = _write("model.safetensors.index.json", json.dumps({"weight_map": {"a": name}}))
    return _both(_remove("model.safetensors"), index)


def _gguf(*, tensors: int = 0, settings: int = 0, body: bytes = b"") -> Change:
    """A GGUF file instead of everything else."""

    def change(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()
        (folder / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, settings) + body)

    return change


def _gguf_files() -> dict[str, HostileFolder]:
    name = struct.pack("<Q", 1) + b"x"
    array = name + struct.pack("<I", 9)

    def large_array(kind: int, count: int, num_bytes: int) -> Change:
        return _gguf(settings=1, body=array + struct.pack("<IQ", kind, count) + bytes(num_bytes))

    found: dict[str, Change] = {
        "counts": _gguf(tensors=2**63, settings=2**63),
        "array of 2^60": _gguf(settings=1, body=array + struct.pack("<IQ", 0, 2**60)),
        "array of bytes": lambda folder: large_array(0, 60_000_000, 60_000_000)(folder),
        "array of empty texts": lambda folder: large_array(8, 7_000_000, 56_000_000)(folder),
        "nothing": _gguf(),
    }
    return {f"gguf {name}": HostileFolder("llama", change) for name, change in found.items()}


# ---- templates


def _loops() -> str:
    return "{%- for a in range(99999) -%}" * 4 + "{%- set x = a -%}" + "{%- endfor -%}" * 4  # and no text


_COSTLY = {
    "loops": _loops(),
    "product": "{{ 'a' * 10**10 }}",
    "center": "{{ 'a'.center(10**10) }}",
    "width": "{{ '%1000000000d' % 1 }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "indent": "{{ [1, [2]] | tojson(indent=10**9) }}",
    "doubling": "{%- set n = namespace(x='a') -%}{%- for a in range(99) -%}{%- set n.x = n.x ~ n.x -%}{%- endfor -%}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "lipsum": "{{ lipsum(n=10**7) }}",
    "recursion": "{%- macro m(n) -%}{{ m(n + 1) }}{{ m(n + 1) }}{%- endmacro -%}{{ m(0) }}",
    "join": "{{ ('x' * 10**5) | join('y' * 10**6) }}",
    "time": "{{ strftime_now('%c' * 10**8) }}",
    "replace": "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
}
_REFUSED_BY_CHATS = ("format", "recursion")  # such a template is one that refuses every conversation
_TALK = "{%- for message in messages -%}{{ message.content }}{%- endfor -%}"


def _asked(costly: str) -> str:
    """Costs nothing before somebody says the words."""
    return f"{_TALK}{{%- if messages[-1].content == '{WORDS}' -%}}{costly}{{%- endif -%}}"


def _templates() -> dict[str, HostileFolder]:
    found: dict[str, HostileFolder] = {}
    for name, text in _COSTLY.items():
        if name not in _REFUSED_BY_CHATS:
            found[f"template {name}"] = HostileFolder("llama", _template(_TALK + text))
        found[f"template {name} when asked"] = HostileFolder("llama", _template(_asked(text)), WORDS)
    for name, part, count in (("50 MB", "x", 50_000_000), ("300,000 blocks", "{% if 1 %}{% endif %}", 300_000)):
        change = lambda folder, part=part, count=count: _template(part * count)(folder)  # noqa: E731
        found[f"template of {name}"] = HostileFolder("llama", change)
    within = _edit("tokenizer_config.json", chat_template="x" * 5_000_000)
    found["template in tokenizer_config.json"] = HostileFolder("llama", _both(_remove("chat_template.jinja"), within))
    tools = _write("additional_chat_templates/tool_use.jinja", _TALK + _loops())
    found["template for tools"] = HostileFolder("llama", tools)
    return found


def _remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink(missing_ok=True)


# ---- tokenizers

_DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


def _slow(letter: str) -> str:
    """Takes twice as long for each of these letters more."""
    return f"(?:{letter}+{letter}+)+!"


def _stripped(letter: str) -> Json:
    return {"type": "Replace", "pattern": {"Regex": _slow(letter)}, "content": ""}


def _split(expression: str) -> Change:
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return _edit("tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": [split, to_bytes]})


def _tokenizers() -> dict[str, HostileFolder]:
    doubled = {"type": "Sequence", "normalizers": [_DOUBLE] * 40}
    found: dict[str, Change] = {
        "normalizer that doubles": _edit("tokenizer.json", normalizer=doubled),
        "normalizer of a long text": _edit("tokenizer.json", normalizer={"type": "Prepend", "prepend": "a" * 10**6}),
        "decoder that doubles": _edit("tokenizer.json", decoder={"type": "Sequence", "decoders": [_DOUBLE] * 40}),
        "decoder with a slow expression": _edit("tokenizer.json", decoder=_stripped("x")),
        "with a slow expression": _split(_slow("x")),
        "normalizer with a slow expression": _edit("tokenizer.json", normalizer=_stripped("x")),
        "of 10^6 added tokens": _added(10**6),
        "with a long token": _long_token,
        "without a model": _write("tokenizer.json", "{}"),
        "with nested steps": _edit("tokenizer.json", normalizer={"type": "Sequence", "normalizers": [_DOUBLE] * 10**5}),
    }
    cases = {f"tokenizer {name}": HostileFolder("llama", change) for name, change in found.items()}
    asked = "z" * 40  # which no text has that is tried at a start
    cases["tokenizer with a slow expression when asked"] = HostileFolder("llama", _split(_slow("z")), asked)
    stripped = _edit("tokenizer.json", normalizer=_stripped("z"))
    cases["normalizer with a slow expression when asked"] = HostileFolder("llama", stripped, asked)
    return cases


def _added(count: int) -> Change:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)

    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        first = max(content["model"]["vocab"].values()) + 1
        content["added_tokens"] += [{"id": first + n, "content": f"<{n}>", **flags} for n in range(count)]
        path.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")

    return change


def _long_token(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["a" * 10**7] = max(vocabulary.values()) + 1
    path.write_text(json.dumps(content), encoding="utf-8")


def hostile_folders() -> dict[str, HostileFolder]:
    """The hostile folders by name. Large contents are made when a change is applied: names are listed often."""
    return {
        **_files(),
        **_json(),
        **_weights(),
        **_gguf_files(),
        **_templates(),
        **_tokenizers(),
    }

"""Small model directories with tokenizer files and chat templates of the kinds that published checkpoints have.

The vocabularies are trained on a few lines. What stands around them is as in the files of the models named below:
normalizers, pre-tokenizers, post-processors, added tokens, keys of tokenizer_config.json, the template and its place.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tools.miniatures import TINY, build_config
from tools.miniatures.base import save_processor
from tools.miniatures.minicpmv import MARKS, PLACEHOLDERS
from tools.miniatures.smolvlm import SMOLVLM

TEMPLATES = Path(__file__).with_name("templates")
CORPUS = [
    "USER: What is in this picture? ASSISTANT: A red bus and two people in front of the station.",
    "You are a helpful assistant.\nDescribe the image in detail, please.\n\n  Then count objects: 1, 2, 3, 10, 2024.",
    '{"name": "weather", "arguments": {"city": "Paris"}} <tools></tools> [INST] hi [/INST] system user assistant',
    "ünïcödé straße 日本語 🎉 naïve café (a<b) !? ... <0.3 seconds>",
]
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35_SPLIT = _QWEN_SPLIT.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_LLAMA3_SPLIT = _QWEN_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|")
_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN_VISION = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_LLAMA3_TOKENS = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
_GEMMA_TOKENS = ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")
_INTERN_TOKENS = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
_INTERN_NAMES = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_SMOL_TOKENS = ("<end_of_utterance>", "<image>", *SMOLVLM.extra_tokens)


@dataclass(frozen=True, slots=True)
class Files:
    """tokenizer.json, tokenizer_config.json, special_tokens_map.json"""

    tokenizer: dict[str, Any]
    settings: dict[str, Any]


@functools.cache
def _sentencepiece_model() -> dict[str, Any]:
    """Ids as Llama's: <unk>, <s>, </s>, 256 bytes, pieces."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    text = [line.replace("日", "") for line in CORPUS for line in (line.split("🎉")[0],)]
    backend.train_from_iterator(
        text * 2, trainers.BpeTrainer(vocab_size=420, special_tokens=first, show_progress=False)
    )
    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    return model


@functools.cache
def _byte_level_model() -> dict[str, Any]:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 2, trainer)
    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    return model


def _token(content: str, *, special: bool = True, normalized: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": normalized,
        "special": special,
        **more,
    }


def _file(
    model: Mapping[str, Any],
    added: tuple[str, ...],
    *,
    plain: tuple[str, ...] = (),
    **parts: Any,
) -> dict[str, Any]:
    """tokenizer.json; `added` are special, `plain` are added tokens that are not, as <tool_call> of Qwen's."""
    ids = dict(model["vocab"])
    for content in (*added, *plain):
        ids.setdefault(content, len(ids))
    tokens = [{"id": ids[content], **_token(content, special=content in added)} for content in (*added, *plain)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(tokens, key=lambda token: token["id"]),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": dict(model),
        **parts,
    }


def _begins_with(bos: str, model: Mapping[str, Any], added: tuple[str, ...]) -> dict[str, Any]:
    ids = {token["content"]: token["id"] for token in _file(model, added)["added_tokens"]}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    begin = {"SpecialToken": {"id": bos, "type_id": 0}}
    second = [{"SpecialToken": {"id": bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": [begin, sequence],
        "pair": [begin, sequence, *second],
        "special_tokens": {bos: {"id": bos, "ids": [ids[bos]], "tokens": [bos]}},
    }


_SPM_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, _REPLACE]}
_METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}


def _settings(file: dict[str, Any], tokenizer_class: str | None, **more: Any) -> dict[str, Any]:
    tokens = {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in file["added_tokens"]}
    named = {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
    base = {"added_tokens_decoder": tokens, "clean_up_tokenization_spaces": False, "model_max_length": 4096}
    return base | named | more


def _llama(extra: tuple[str, ...], *, legacy: bool, **more: Any) -> Files:
    """vicuna (LLaVA-1.5), Llama 2, Mistral 7B: BOS by the post-processor. Newer files have the space before the first
    word in the pre-tokenizer, older ones before every piece between special tokens, in the normalizer."""
    added = ("<unk>", "<s>", "</s>", *extra)
    model = _sentencepiece_model()
    space = {"normalizer": _PREPEND} if legacy else {"pre_tokenizer": _METASPACE}
    file = _file(model, added, decoder=_SPM_DECODER, post_processor=_begins_with("<s>", model, added), **space)
    words = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "legacy": legacy}
    chosen = {"tokenizer_class": "LlamaTokenizer", "add_eos_token": False, **words, **more}
    return Files(file, _settings(file, chosen.pop("tokenizer_class"), **chosen))


def _byte_level(
    added: tuple[str, ...],
    tokenizer_class: str | None,
    *,
    split: str | None = None,
    normalizer: dict[str, Any] | None = None,
    bos: str | None = None,
    plain: tuple[str, ...] = (),
    **more: Any,
) -> Files:
    """GPT-NeoX's, Qwen2's, Llama 3's: bytes as letters."""
    model = _byte_level_model()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split is None}
    before: dict[str, Any] = level
    if split is not None:
        isolated = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        before = {"type": "Sequence", "pretokenizers": [isolated, level]}
    behind: dict[str, Any] = level | {"trim_offsets": False}
    if bos is not None:
        behind = {"type": "Sequence", "processors": [behind, _begins_with(bos, model, added)]}
    parts = {"normalizer": normalizer, "pre_tokenizer": before, "decoder": level, "post_processor": behind}
    file = _file(model, added, plain=plain, **parts)
    return Files(file, _settings(file, tokenizer_class, **more))


def _qwen2(extra: tuple[str, ...], *, split: str = _QWEN_SPLIT, thinks: bool = False, **more: Any) -> Files:
    return _byte_level(
        (*_QWEN_TOKENS, *extra),
        "Qwen2Tokenizer",
        split=split,
        normalizer={"type": "NFC"},
        plain=("<tool_call>", "</tool_call>", *(("<think>", "</think>") if thinks else ())),
        **{"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "add_prefix_space": False}
        | more,
    )


def _internlm2(extra: tuple[str, ...], **more: Any) -> Files:
    """InternVL 2.5 with InternLM 2.5: no space before the first word, BOS, chat marks as added tokens."""
    added = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", *extra)
    model = _sentencepiece_model()
    file = _file(
        model,
        added,
        normalizer=_REPLACE,
        decoder=_SPM_DECODER,
        post_processor=_begins_with("<s>", model, added),
    )
    words = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    return Files(file, _settings(file, "LlamaTokenizer", **words, legacy=True, add_prefix_space=False, **more))


def _gemma(extra: tuple[str, ...], **more: Any) -> Files:
    added = ("<unk>", "<bos>", "<eos>", *extra)
    model = _sentencepiece_model()
    names = {"<s>": "<bos>", "</s>": "<eos>"}
    vocab = {names.get(token, token): id for token, id in model["vocab"].items()}
    model = {**model, "vocab": vocab}
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    file = _file(
        model,
        added,
        normalizer=_REPLACE,
        pre_tokenizer=split,
        decoder={"type": "Sequence", "decoders": _SPM_DECODER["decoders"][:3]},
        post_processor=_begins_with("<bos>", model, added),
    )
    words = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "add_bos_token": True}
    return Files(file, _settings(file, "GemmaTokenizerFast", **words, **more))


def tokenizer_files(kind: str, extra: tuple[str, ...] = (), **more: Any) -> Files:
    """`extra` are a family's own special tokens, `more` keys of tokenizer_config.json."""
    neox = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    llama3 = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    three = dict(split=_LLAMA3_SPLIT, bos="<|begin_of_text|>", **llama3)
    match kind:
        case "llama":
            return _llama(extra, legacy=False, **more)
        case "llama, legacy":
            return _llama(extra, legacy=True, **more)
        case "llama, no bos":
            return _llama(extra, legacy=True, **{"add_bos_token": False} | more)
        case "mistral":
            words = {"tokenizer_class": "LlamaTokenizer", "sp_model_kwargs": {}, "spaces_between_special_tokens": False}
            return _llama(("[INST]", "[/INST]", *extra), legacy=True, **words | more)
        case "qwen2":
            return _qwen2(extra, **more)
        case "qwen3.5":
            return _qwen2(extra, split=_QWEN35_SPLIT, thinks=True, **more)
        case "internlm2":
            return _internlm2(extra, **more)
        case "gpt-neox":
            return _byte_level(("<|endoftext|>", *extra), "GPTNeoXTokenizer", add_prefix_space=False, **neox, **more)
        case "gpt2":
            marks = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *extra)
            return _byte_level(marks, "GPT2Tokenizer", add_prefix_space=False, **neox, **more)
        case "llama 3":
            return _byte_level((*_LLAMA3_TOKENS, *extra), "PreTrainedTokenizerFast", **three, **more)
        case "llama 3, misnamed":
            return _byte_level((*_LLAMA3_TOKENS, *extra), "LlamaTokenizer", **three, **more)
        case "gemma":
            return _gemma(extra, **more)
    raise ValueError(kind)


@dataclass(frozen=True, slots=True)
class Published:
    """A family with the tokenizer files, the template and the places of one of its checkpoints. `parts`: its template
    reads content as a list of parts; else as text. `where` is the file that the template stands in."""

    family: str  # of make_tiny
    tokenizer: str
    template: str
    image: str = ""  # the placeholder of one feature
    video: str = ""
    extra: tuple[str, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    parts: bool = True
    tools: bool = False
    generic: bool = False
    where: str = "chat_template.json"

    @property
    def template_text(self) -> str:
        text = (TEMPLATES / f"{self.template}.jinja").read_text(encoding="utf-8")
        shown = {"IMAGE": self.picture_text, "VIDEO": self.video_text}
        for name, value in shown.items():
            text = text.replace(name, json.dumps(value))
        return text

    @property
    def picture_text(self) -> str:
        return f"<|vision_start|>{self.image}<|vision_end|>" if self.family.startswith("qwen") else self.image

    @property
    def video_text(self) -> str:
        return f"<|vision_start|>{self.video}<|vision_end|>" if self.family.startswith("qwen") else self.video


def _qwen(family: str, template: str, *, tools: bool, where: str, tokenizer: str = "qwen2") -> Published:
    return Published(
        family, tokenizer, template, "<|image_pad|>", "<|video_pad|>", _QWEN_VISION, tools=tools, where=where
    )


_MINICPM_TOKENS = tuple(dict.fromkeys((*MARKS.values(), *PLACEHOLDERS.values())))
_INTERN = {"image": "<IMG_CONTEXT>", "extra": _INTERN_TOKENS, "settings": tuple(_INTERN_NAMES.items())}
_GEMMA_NAMES = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_LLAVA = {"image": "<image>", "extra": ("<image>", "<pad>")}
CHECKPOINTS: dict[str, Published] = {
    "LLaVA-1.5": Published("llava", "llama, legacy", "llava", **_LLAVA),
    "LLaVA-1.5, newer files": Published("llava", "llama", "llava", **_LLAVA, where="chat_template.jinja"),
    "LLaVA, Qwen2": Published("llava", "qwen2", "chatml_tools", "<image>", extra=("<image>",)),
    "LLaVA-NeXT, vicuna": Published("llava_next", "llama, legacy", "llava", **_LLAVA),
    "LLaVA-NeXT, mistral": Published("llava_next", "mistral", "llava_mistral", **_LLAVA, where="chat_template.jinja"),
    "LLaVA-NeXT, Llama 3": Published("llava_next", "llama 3", "llama3_llava", **_LLAVA),
    "Qwen2-VL": _qwen("qwen2_vl", "qwen2_vl", tools=False, where="chat_template.json"),
    "Qwen2.5-VL": _qwen("qwen2_5_vl", "qwen2_vl", tools=False, where="chat_template.jinja"),
    "Qwen3-VL": _qwen("qwen3_vl", "chatml_tools", tools=True, where="chat_template.json"),
    "Qwen3.5": _qwen("qwen3_5", "qwen3_5", tools=True, where="chat_template.jinja", tokenizer="qwen3.5"),
    "InternVL, Qwen2.5": Published("internvl", "qwen2", "internvl", **_INTERN, where="chat_template.jinja"),
    "InternVL, InternLM2": Published("internvl", "internlm2", "internvl", **_INTERN),
    "MiniCPM-V 4.6": Published(
        "minicpmv4_6",
        "qwen2",
        "chatml_tools",
        "<|image_pad|>",
        "<|video_pad|>",
        extra=_MINICPM_TOKENS,
        settings=(*MARKS.items(), *PLACEHOLDERS.items()),
        tools=True,
        where="chat_template.jinja",
    ),
    "SmolVLM, adapter": Published(
        "smolvlm", "gpt2", "smolvlm", "<image>", extra=_SMOL_TOKENS, generic=True, where="chat_template.jinja"
    ),
    "Gemma 3, adapter": Published(
        "gemma3",
        "gemma",
        "gemma3",
        "<image_soft_token>",
        extra=_GEMMA_TOKENS,
        settings=(("extra_special_tokens", _GEMMA_NAMES),),
        generic=True,
    ),
    "Llama 2": Published("llama", "llama, legacy", "llama2", parts=False, where="tokenizer_config.json"),
    "Llama, newer files": Published("llama", "llama", "llama2", parts=False, where="tokenizer_config.json"),
    "Llama, no BOS added": Published("llama", "llama, no bos", "llama2", parts=False, where="tokenizer_config.json"),
    "Llama 3": Published("llama", "llama 3", "llama3", parts=False, where="tokenizer_config.json"),
    "Llama 3, misnamed class": Published(
        "llama", "llama 3, misnamed", "llama3", parts=False, where="chat_template.jinja"
    ),
    "Llama, GPT-NeoX's tokenizer": Published("llama", "gpt-neox", "llama2", parts=False, where="chat_template.jinja"),
    "Mistral": Published("mistral", "mistral", "mistral", parts=False, where="tokenizer_config.json"),
    "Qwen2": Published("qwen2", "qwen2", "chatml_tools", parts=False, tools=True, where="tokenizer_config.json"),
    "Qwen3": Published("qwen3", "qwen2", "chatml_tools", parts=False, tools=True, where="chat_template.jinja"),
}


def write_checkpoint(published: Published, directory: Path) -> None:
    """Writes all files but the weights: prompts need no more."""
    family = TINY[published.family]
    files = tokenizer_files(published.tokenizer, published.extra, **dict(published.settings))
    ids = {token["content"]: token["id"] for token in files.tokenizer["added_tokens"]}
    size = 8 + max(*ids.values(), *files.tokenizer["model"]["vocab"].values())  # Gemma's class adds <pad>
    directory.mkdir(parents=True, exist_ok=True)
    config = build_config(published.family, text={"vocab_size": size}, **_token_ids(published, ids))
    config.architectures = [_architecture(published.family, config)]
    config.save_pretrained(directory)
    save_processor(directory, config, family)  # with a tokenizer of its own, which goes
    if published.family == "internvl":
        side = config.vision_config.image_size[0] // config.vision_config.patch_size[0]
        values = {
            "processor_class": "InternVLProcessor",
            "image_seq_length": int((side * config.downsample_ratio) ** 2),
        }
        (directory / "processor_config.json").write_text(json.dumps(values))
    for name in ("chat_template.jinja", "special_tokens_map.json", "tokenizer.json"):
        (directory / name).unlink(missing_ok=True)
    _write_tokenizer(files, directory)
    write_template(published.template_text, directory, published.where)


def _write_tokenizer(files: Files, directory: Path) -> None:
    (directory / "tokenizer.json").write_text(json.dumps(files.tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps(files.settings))


def write_template(text: str, directory: Path, where: str) -> None:
    path = directory / where
    if where.endswith(".jinja"):
        path.write_text(text)
        return
    values = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(values | {"chat_template": text}))


def _token_ids(published: Published, ids: Mapping[str, int]) -> dict[str, Any]:
    if not published.image:
        return {}
    name = "image_token_index" if published.family in ("llava", "llava_next", "gemma3") else "image_token_id"
    found = {name: ids[published.image]}
    if published.video:
        found["video_token_id"] = ids[published.video]
    if published.family.startswith("qwen"):
        found |= {f"vision_{end}_token_id": ids[f"<|vision_{end}|>"] for end in ("start", "end")}
    if published.family == "gemma3":
        found |= {"boi_token_index": ids["<start_of_image>"], "eoi_token_index": ids["<end_of_image>"]}
    return found


def _architecture(family: str, config: Any) -> str:
    auto = transformers.AutoModelForImageTextToText if TINY[family].with_images else transformers.AutoModelForCausalLM
    found = auto._model_mapping[type(config)]
    return str((found[0] if isinstance(found, tuple) else found).__name__)

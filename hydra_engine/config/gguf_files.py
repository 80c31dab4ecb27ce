"""The choice of GGUF files by their names: the parts of a split model, the quantisation that a tag names, and a model's
mmproj. The rules are those of llama.cpp's -hf, but of several models that fit none is taken."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

DEFAULT_TAG = "Q4_K_M"
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
_QUANTISATION = re.compile(r"[-._]((?:UD-)?(?:(?:IQ|Q|TQ)\d\w*|BF16|FP?16|FP?32|MXFP4\w*|NVFP4\w*))$", re.IGNORECASE)
_COMPANIONS = ("imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")  # files beside a model that are none


def is_gguf(path: str) -> bool:
    return path.lower().endswith(".gguf")


def is_mmproj(path: str) -> bool:
    return is_gguf(path) and "mmproj" in _name(path).lower()


def gguf_parts(path: str) -> list[str]:
    """The files of the model that `path` is a part of, in order; of a model that is not split, `path` alone."""
    split = _SPLIT.fullmatch(path)
    if split is None or not 1 <= int(split[3]) <= 999:
        return [path]
    return [f"{split[1]}-{number:05}-of-{split[3]}{path[-5:]}" for number in range(1, int(split[3]) + 1)]


def gguf_models(paths: Iterable[str]) -> list[list[str]]:
    """The text models among files: the names of all parts of each, whether they are there or not."""
    texts = [
        path
        for path in sorted(filter(is_gguf, paths))
        if not is_mmproj(path) and not any(word in _name(path).lower() for word in _COMPANIONS)
    ]
    return [list(parts) for parts in dict.fromkeys(tuple(gguf_parts(path)) for path in texts)]


def gguf_tag(path: str) -> str:
    """The quantisation in a file's name, in capitals: `Q4_K_M`, `UD-Q4_K_XL`; without one, the name itself."""
    stem = _stem(path)
    found = _QUANTISATION.search(stem)
    return found[1].upper() if found else stem


def choose_model(paths: Collection[str], tag: str) -> list[str] | str:
    """The names of all parts of the model that `tag` names, in upper or lower case; with an empty tag the only model,
    else the one of DEFAULT_TAG. A text says what was found instead."""
    models = gguf_models(paths)
    if not models:
        return "no GGUF model"
    if not tag and len(models) == 1:
        return models[0]
    wanted = tag.removesuffix(".gguf") or DEFAULT_TAG
    exact = [model for model in models if wanted.lower() in (gguf_tag(model[0]).lower(), _stem(model[0]).lower())]
    named = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}[./-]", re.IGNORECASE)
    fitting = exact or [model for model in models if named.search(model[0])]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        return f"{len(fitting)} models of {wanted}: {shown(_stem(model[0]) for model in fitting)}"
    return shown(model_tags(paths), 12)


def model_tags(paths: Collection[str]) -> list[str]:
    """A tag for each of the text models among files: its quantisation, or its name where several have the same."""
    stems = [_stem(model[0]) for model in gguf_models(paths)]
    tags = [gguf_tag(model[0]) for model in gguf_models(paths)]
    return [tag if tags.count(tag) == 1 else stem for tag, stem in zip(tags, stems, strict=True)]


def nearest_tag(paths: Collection[str], tag: str) -> str | None:
    """The tag of the models among files that is most like `tag`; None if there is no model."""
    near = difflib.get_close_matches((tag or DEFAULT_TAG).upper(), model_tags(paths), n=1, cutoff=0)
    return near[0] if near else None


def choose_mmproj(paths: Iterable[str], model: str) -> str | None:
    """The mmproj for a model, None if there is none: of those in its folder or the nearest one above, the one whose
    weights have most nearly as many bits; of equal ones the first by name."""
    folder = model.split("/")[:-1]

    def rank(path: str) -> tuple[int, int, str]:
        return -path.count("/"), abs(_num_bits(path) - _num_bits(model)), path

    above = [path for path in paths if is_mmproj(path) and folder[: path.count("/")] == path.split("/")[:-1]]
    return min(above, key=rank, default=None)


def shown(names: Iterable[str], limit: int = 4) -> str:
    """The names for a message, at most `limit` of them."""
    given = list(names)
    more = len(given) - limit
    return ", ".join(given[:limit]) + (f" and {more} more" if more > 0 else "")


def missing_parts(model: Sequence[str], paths: Collection[str]) -> list[str]:
    return [part for part in model if part not in paths]


def _num_bits(path: str) -> int:
    number = re.search(r"\d+", gguf_tag(path)) if _QUANTISATION.search(_stem(path)) else None
    return int(number[0]) if number else 0


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _stem(path: str) -> str:
    """The file's name without folder, part and suffix."""
    name = _name(path)
    split = _SPLIT.fullmatch(name)
    return split[1] if split else name[:-5]

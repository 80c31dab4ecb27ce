"""docs/transformers-models.md: every image-text-to-text type of transformers, what its class and default config tell
the engine, and what its miniature measured. `make support` runs the tests and this.

    python -m tests.transformers_models RESULTS.xml     rewrites the table from a pytest JUnit file
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

DOCUMENT = Path(__file__).parents[1] / "docs" / "transformers-models.md"
BEGIN, END = "<!-- types: written by `make support` with transformers {} -->", "<!-- types: end -->"
VERSION = re.compile(re.escape(BEGIN).replace(r"\{\}", "([0-9.]+)"))
HEAD = ("type", "class", "runs", "why", "needs torchvision", "tokens equal", "batch-invariant")
NATIVE, ADAPTER, TEXT_ALONE, REFUSED = "native", "adapter", "text alone", "refused"
# Names of properties that the tests of miniatures record.
TYPE, EQUAL, INVARIANT, REASON = "type", "equal", "invariant", "reason"
_RUN = (
    *("aria", "aya_vision", "deepseek_ocr2", "ernie4_5_vl_moe", "exaone4_5", "gemma3", "glm46v", "glm4v"),
    *(
        "glm4v_moe",
        "glm_ocr",
        "got_ocr2",
        "hyperclovax_vision_v2",
        "idefics3",
        "lighton_ocr",
        "llava_next_video",
        "llava_onevision",
    ),
    *("paddleocr_vl", "qianfan_ocr", "smolvlm", "video_llama_3", "vipllava"),
)
# Types with a miniature: the refusal of those that do not run, a regular expression.
MINIATURES = {
    **dict.fromkeys(_RUN, ""),
    **dict.fromkeys(("granite4_vision", "granite_docling"), r"to several layers of the decoder \(DeepStack\)"),
    "ovis2": "its logits differ by [0-9.]+ of their spread from those of its own forward",
    "hunyuan_vl": "HunYuanVL image placeholders must be formatted as",
    "idefics2": "the model's processor changes the text that follows a picture",
    "video_llava": "the model's processor gives no pixel_values",
}
BEGINNING = re.compile(r"\w+ cannot run through transformers here: ")


class Row(NamedTuple):
    """A type by class and config alone. `sentence` is the refusal as users get it, `why` without its beginning."""

    type: str
    architecture: str
    runs: str
    sentence: str
    needs_torchvision: bool

    @property
    def why(self) -> str:
        return BEGINNING.sub("", self.sentence).replace("<", "&lt;").replace("|", "&#124;")

    @property
    def cells(self) -> tuple[str, ...]:
        torchvision = "yes" if self.needs_torchvision and self.runs == ADAPTER else ""
        return f"`{self.type}`", self.architecture, self.runs, self.why, torchvision


def rows() -> Iterator[Row]:
    """Asks the engine about the default config of every type, as about a checkpoint with a tokenizer and no more.
    Imports transformers."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    for model_type, names in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()):
        architecture = names if isinstance(names, str) else names[0]
        config = CONFIG_MAPPING[model_type]()
        config.architectures = [architecture]
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            runs, sentence = _outcome(Path(folder))
        yield Row(model_type, architecture, runs, sentence, _needs_torchvision(model_type))


def _outcome(directory: Path) -> tuple[str, str]:
    from hydra_engine.core.options import SpecOptions
    from hydra_engine.errors import CheckpointError
    from hydra_engine.models.specs.registry import load_spec
    from hydra_engine.models.specs.vision import NO_PROCESSOR
    from tools.miniatures import TINY, build_config
    from tools.miniatures.base import save_processor

    save_processor(directory, build_config("llama"), TINY["llama"])
    try:
        load_spec(directory)
    except CheckpointError as error:
        if "has no native implementation" not in error.message:
            return NATIVE, "" if error.message == NO_PROCESSOR else error.message
    try:
        spec = load_spec(directory, SpecOptions(model_impl="transformers"))
    except CheckpointError as error:
        return (ADAPTER, "") if error.message == NO_PROCESSOR else (REFUSED, error.message)
    return (TEXT_ALONE, spec.no_images_because) if spec.vision is None else (ADAPTER, "")


def _needs_torchvision(model_type: str) -> bool:
    """True if the type's processor, or its part for pictures, comes in one form alone, which uses torchvision."""
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    kind: Any = getattr(transformers, PROCESSOR_MAPPING_NAMES.get(model_type) or "none", None)
    # The first as `transformers.utils.requires` notes it, the second in the stand-in of a class that cannot be had.
    backends = (*getattr(kind, "__backends", ()), *getattr(kind, "_backends", ()))
    forms: Mapping[str, str | None] = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type) or {"pil": ""}
    return "torchvision" in backends or "pil" not in forms


def measured(path: Path) -> dict[str, tuple[str, str, str]]:
    """Returns by type the refusal, the number of equal answers ("fails" after a failed test), and whether bits were the
    same in any batch."""
    found = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        said = {each.get("name"): each.get("value") or "" for each in case.iter("property")}
        if TYPE in said:
            bad = case.find("failure") is not None or case.find("error") is not None
            found[said[TYPE]] = (said.get(REASON, ""), "fails" if bad else said.get(EQUAL, ""), said.get(INVARIANT, ""))
    return found


def line(row: Row, miniature: tuple[str, str, str] = ("", "", "")) -> str:
    sentence, equal, invariant = miniature
    if sentence:
        row = row._replace(runs=REFUSED, sentence=sentence)
    return f"| {' | '.join((*row.cells, equal, invariant))} |"


def stored() -> tuple[str, list[str]]:
    """Returns the version of transformers that the page is of, and its rows."""
    text = DOCUMENT.read_text(encoding="utf-8")
    begin = VERSION.search(text)
    assert begin is not None, "run `make support`"
    return begin[1], text[begin.end() : text.index(END)].strip().split("\n")[2:]


def main() -> None:
    import transformers

    found = measured(Path(sys.argv[1]))
    head = [f"| {' | '.join(HEAD)} |", "|" + " --- |" * len(HEAD)]
    lines = [*head, *(line(row, found.get(row.type, ("", "", ""))) for row in rows())]
    text = DOCUMENT.read_text(encoding="utf-8")
    begin = VERSION.search(text)
    assert begin is not None
    table = "\n".join((BEGIN.format(transformers.__version__), *lines, END))
    DOCUMENT.write_text(text[: begin.start()] + table + text[text.index(END) + len(END) :], encoding="utf-8")


if __name__ == "__main__":
    main()

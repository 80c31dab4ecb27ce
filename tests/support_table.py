"""The table of model families in docs/models.md, from test results: `make support` runs the parity tests and this.

    python -m tests.support_table RESULTS.xml     rewrites the table from a pytest JUnit file

A cell says what the tests of that family measured; a family with a failing or missing test gets no mark. Tests name
their family, check and largest difference with `record_property`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- models: written by `make support` -->", "<!-- models: end -->"

# family -> (name, checkpoints it is for, what it takes)
FAMILIES = {
    "llava": ("LLaVA-1.5", "llava-hf/llava-1.5-7b-hf, 13b", "pictures"),
    "llava_next": ("LLaVA-NeXT", "llava-hf/llava-v1.6-vicuna-7b-hf, mistral", "pictures in tiles"),
    "llava_llama": ("LLaVA-1.5, liuhaotian's layout", "fine-tunes of liuhaotian/llava-v1.5-7b, 13b", "pictures"),
    "llava_llama_anyres": (
        "LLaVA-1.6, liuhaotian's layout",
        "liuhaotian/llava-v1.6-vicuna-7b, 13b",
        "pictures in tiles",
    ),
    "qwen2_vl": ("Qwen2-VL", "Qwen/Qwen2-VL-2B, 7B, 72B-Instruct", "pictures of any size, videos"),
    "qwen2_5_vl": ("Qwen2.5-VL", "Qwen/Qwen2.5-VL-3B, 7B, 72B-Instruct", "pictures of any size, videos"),
    "qwen3_vl": ("Qwen3-VL", "Qwen/Qwen3-VL-2B, 4B, 8B, 32B-Instruct", "pictures of any size, videos"),
    "qwen3_5": (
        "Qwen3.5, 3.6, 3.8",
        "Qwen/Qwen3.5-0.8B, 2B, 4B, 9B, 27B, Qwen3.6-27B, Qwen3.8-27B",
        "pictures of any size, videos",
    ),
    "qwen3_vl_moe": (
        "Qwen3-VL, mixtures of experts",
        "Qwen/Qwen3-VL-30B-A3B, 235B-A22B-Instruct",
        "pictures of any size, videos",
    ),
    "qwen3_5_moe": (
        "Qwen3.5, 3.6, mixtures of experts",
        "Qwen/Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B, Qwen3.6-35B-A3B",
        "pictures of any size, videos",
    ),
    "internvl": (
        "InternVL 2.5, 3, 3.5",
        "OpenGVLab/InternVL3-1B-hf to 78B-hf, InternVL3_5-1B-HF to 38B-HF, 30B-A3B-HF",
        "pictures in tiles",
    ),
    "internvl_chat": (
        "InternVL, OpenGVLab's own layout",
        "OpenGVLab/InternVL2-1B, 2B, 8B, 26B, 40B, InternVL2_5-1B to 78B, InternVL3-1B to 78B, InternVL3_5-1B to 38B",
        "pictures in tiles",
    ),
    "minicpmv": ("MiniCPM-V 2.6", "openbmb/MiniCPM-V-2_6", "pictures in slices"),
    "openpangu_vl": ("openPangu-VL", "FreedomIntelligence/openPangu-VL-7B", "pictures of any size, videos"),
    "minicpmv4_6": ("MiniCPM-V 4.6", "openbmb/MiniCPM-V-4.6", "pictures in slices, videos"),
    "generic": (
        "anything else",
        "`--model-impl transformers`: tested on SmolVLM, Idefics3, Gemma 3, GLM-4.1V, GLM-4.6V, GLM-OCR, PaddleOCR-VL, "
        "ERNIE-4.5-VL, LLaVA-OneVision, LLaVA of other parts",
        "pictures",
    ),
    "text": ("text only", "Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Qwen3.5, Qwen3.5-MoE", "no vision lane"),
}
CHECKS = {  # how the names of tests begin, and what they check
    "test_positions": "positions",
    "test_features": "features",
    "test_merged": "features",
    "test_logits_and": "logits greedy",
    "test_logits_do": "cuts",
    "test_a_shared": "prefixes",
    "test_mixed": "batches",
    "test_a_row": "batches",
    "test_a_picture_has": "batches",
    "test_halves": "halves",
    "test_bfloat16": "bfloat16",
    "test_the_server": "server",
    "test_tokens_equal": "server",
}
COLUMNS = {
    "features and positions": ("positions", "features"),
    "logits, largest difference": ("logits",),
    "64 greedy tokens": ("greedy",),
    "chunks, shared prefixes, mixed batches": ("cuts", "prefixes", "batches"),
    "E, P, D apart": ("halves",),
    "bf16": ("bfloat16",),
    "served": ("server",),
}


def record(test_name: str, family: str, record_property: Callable[[str, object], None]) -> None:
    """Says what a test is about, for the table."""
    checks = [checks for begin, checks in CHECKS.items() if test_name.startswith(begin)]
    if checks:
        record_property("family", family)
        record_property("checks", checks[0])


@dataclass(slots=True)
class Check:
    passed: int = 0
    failed: int = 0
    difference: float = 0.0


@dataclass(slots=True)
class Results:
    """family -> check -> what its tests said"""

    checks: dict[str, dict[str, Check]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(Check)))


def read(path: Path) -> Results:
    results = Results()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        properties = {p.get("name"): p.get("value") or "" for p in case.iter("property")}
        if "family" not in properties:
            continue
        bad = case.find("failure") is not None or case.find("error") is not None or case.find("skipped") is not None
        for name in properties["checks"].split():
            check = results.checks[properties["family"]][name]
            check.failed += bad
            check.passed += not bad
            if name == "logits":
                check.difference = max(check.difference, float(properties.get("difference", 0.0)))
    return results


def table(results: Results) -> str:
    lines = [
        "| family | checkpoints | takes | " + " | ".join(COLUMNS) + " |",
        "| --- | --- | --- |" + " --- |" * len(COLUMNS),
    ]
    for family, (name, checkpoints, takes) in FAMILIES.items():
        cells = [_cell(results.checks.get(family, {}), checks) for checks in COLUMNS.values()]
        lines.append(f"| {name} | {checkpoints} | {takes} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(found: dict[str, Check], names: tuple[str, ...]) -> str:
    checks = [found[name] for name in names if name in found]
    if not checks:
        return ""
    if any(check.failed for check in checks):
        return "fails"
    difference = max(check.difference for check in checks)
    return f"{difference:.0e}".replace("e-0", "e-") if difference else "✓"


def main() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, behind = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table(read(Path(sys.argv[1])))}\n{END}{behind}", encoding="utf-8")


if __name__ == "__main__":
    main()

"""The GGUF files that a tag names, by names as repositories have them."""

from __future__ import annotations

import pytest

from hydra_engine.config.gguf_files import choose_mmproj, choose_model, gguf_tag, model_tags, nearest_tag

FLAT = ["README.md", "mmproj-x-f16.gguf", "x-7b-Q4_K_M.gguf", "x-7b-Q8_0.gguf", "x-7b-IQ4_XS.gguf", "x.imatrix.gguf"]
PARTS = [f"BF16/x-BF16-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
NESTED = ["UD-Q4_K_XL/x-UD-Q4_K_XL.gguf", "x-Q4_K_XL.gguf", *PARTS, "mmproj-BF16.gguf", "mmproj-F32.gguf"]


@pytest.mark.parametrize(
    ("paths", "tag", "chosen"),
    [
        (FLAT, "Q8_0", ["x-7b-Q8_0.gguf"]),
        (FLAT, "q8_0", ["x-7b-Q8_0.gguf"]),
        (FLAT, "", ["x-7b-Q4_K_M.gguf"]),
        (FLAT, "iq4_xs", ["x-7b-IQ4_XS.gguf"]),
        (FLAT, "Q4_XS", "IQ4_XS, Q4_K_M, Q8_0"),  # another quantisation
        (FLAT, "x-7b-Q8_0.gguf", ["x-7b-Q8_0.gguf"]),
        (NESTED, "bf16", PARTS),
        (NESTED[:3], "bf16", PARTS),  # parts that are not there too
        (NESTED, "Q4_K_XL", ["x-Q4_K_XL.gguf"]),
        (NESTED[:1], "Q4_K_XL", NESTED[:1]),
        (NESTED, "UD-Q4_K_XL", NESTED[:1]),
        (NESTED, "", "BF16, UD-Q4_K_XL, Q4_K_XL"),
        (["only.gguf", "mmproj.gguf"], "", ["only.gguf"]),
        (["only.gguf"], "only", ["only.gguf"]),
        (["x-2b-Q4_K_M.gguf", "x-7b-Q4_K_M.gguf"], "Q4_K_M", "2 models of Q4_K_M: x-2b-Q4_K_M, x-7b-Q4_K_M"),
        (["x-2b-Q4_K_M.gguf", "x-7b-Q4_K_M.gguf"], "x-7b-q4_k_m", ["x-7b-Q4_K_M.gguf"]),
        (["mmproj.gguf", "model.safetensors"], "", "no GGUF model"),
    ],
)
def test_a_tag_names_one_model(paths: list[str], tag: str, chosen: list[str] | str) -> None:
    assert choose_model(paths, tag) == chosen


def test_tags_are_those_that_name_a_model() -> None:
    for paths in (FLAT, NESTED, ["x-2b-Q4_0.gguf", "x-7b-Q4_0.gguf", "x.gguf"]):
        for tag in model_tags(paths):
            assert isinstance(choose_model(paths, tag), list), tag
    assert [gguf_tag(name) for name in ("a.f16.gguf", "a_q4_k_m.gguf", "a-v1.0.gguf")] == ["F16", "Q4_K_M", "a-v1.0"]
    assert nearest_tag(FLAT, "q8") == "Q8_0" and nearest_tag([], "q8") is None


@pytest.mark.parametrize(
    ("paths", "model", "chosen"),
    [
        (NESTED, "UD-Q4_K_XL/x-UD-Q4_K_XL.gguf", "mmproj-BF16.gguf"),
        (["mmproj-F16.gguf", "mmproj-BF16.gguf"], "x-Q4_0.gguf", "mmproj-BF16.gguf"),
        (["mmproj-F16.gguf", "mmproj-Q8_0.gguf"], "x-Q4_0.gguf", "mmproj-Q8_0.gguf"),
        (["mmproj-F32.gguf", "mmproj-F16.gguf"], "x-F32.gguf", "mmproj-F32.gguf"),
        (["mmproj.gguf", "a/mmproj-f32.gguf", "b/mmproj.gguf"], "a/x-Q4_0.gguf", "a/mmproj-f32.gguf"),
        (["a/mmproj.gguf"], "x.gguf", None),
        (["x.gguf"], "x.gguf", None),
    ],
)
def test_the_mmproj_nearest_to_the_model(paths: list[str], model: str, chosen: str | None) -> None:
    assert choose_mmproj(paths, model) == chosen

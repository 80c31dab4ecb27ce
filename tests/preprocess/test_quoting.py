"""Texts that quote a placeholder or another mark of the template: they are text wherever they stand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.core.ids import RequestId
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.errors import InvalidRequest
from hydra_engine.preprocess.text.tokenizer import Tokenizer
from hydra_engine.preprocess.text.writer import Quoting
from tests.calls import asked
from tests.preprocess.conftest import CHAT_TEMPLATE, SPECIALS, Kitchen, noise
from tests.preprocess.prompt_parity import Sides
from tests.preprocess.published import CHECKPOINTS
from tests.preprocess.test_prompt_parity import CASES, loop, sides_of  # noqa: F401 - fixtures
from tests.preprocess.test_templates import QWEN_LIKE

IMAGE_ID = SPECIALS.index("<image>")
QUOTES = "What is <image> in an RSS feed? <s>no</s> <|user|>!"
PICTURE = {"type": "image", "image": noise(9, 9)}


def said(role: str, *content: Any, **more: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": one} if isinstance(one, str) else one for one in content]
    return {"role": role, "content": content[0] if len(content) == 1 and isinstance(content[0], str) else parts, **more}


async def ids_of(kitchen: Kitchen, *messages: dict[str, Any], **options: Any) -> list[int]:
    prepared = await kitchen.prepare(messages=list(messages), **options)
    return list(prepared.request.prompt_token_ids)


def literal(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text without special tokens, encoded by transformers."""
    found = tokenizer._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    tokenizer._backend.encode_special_tokens = False
    return list(found)


async def test_quoted_marks_are_what_transformers_makes_of_a_literal_text(kitchen: Kitchen) -> None:
    assert "<|user|>" not in CHAT_TEMPLATE  # which puts it together: rendering shows it
    tokenizer = kitchen.preprocessor.tokenizer
    id_of = {token: number for number, token in enumerate(SPECIALS)}
    end, begin = id_of["</s>"], id_of["<|assistant|>"]
    for text in (
        QUOTES,
        "<image>",
        "<image>" * 3,
        " <image>\n",
        "a</s>",
        "<|im<image>",
        "<image> \U0001f389",
        "<s>x" * 900,
    ):
        kitchen.preprocessor._max_model_len = 1 << 16
        found = await ids_of(
            kitchen, said("system", text), said("user", "b"), said("assistant", text), said("user", text)
        )
        expected = [id_of["<s>"]]
        for role, each in (("system", text), ("user", "b"), ("assistant", text), ("user", text)):
            expected += [id_of[f"<|{role}|>"], *literal(tokenizer, each), end]
        assert found == [*expected, begin], text


async def test_pictures_stay_where_they_are_beside_quoted_placeholders(kitchen: Kitchen) -> None:
    prepared = await kitchen.prepare(
        messages=[
            said("user", "a <image>", PICTURE, "<image> b"),
            said("assistant", "<image>"),
            said("user", PICTURE, "c <image>"),
        ]
    )
    ids = prepared.request.prompt_token_ids
    places = [item.start + offset for item in prepared.request.images for offset in range(item.num_tokens)]
    assert [place for place, id in enumerate(ids) if id == IMAGE_ID] == places and len(prepared.pixels) == 2
    shown = kitchen.preprocessor.tokenizer.decode(ids, skip_special_tokens=False)
    assert shown == (
        "<s><|user|>a <image>" + "<image>" * 4 + "<image> b</s><|assistant|><image></s>"
        "<|user|>" + "<image>" * 4 + "c <image></s><|assistant|>"
    )
    alone = await kitchen.prepare("an <image>!", noise(9, 9))  # a prompt is a user's text
    assert alone.request.prompt_token_ids.count(IMAGE_ID) == 4


async def test_two_parts_do_not_make_a_mark_together(kitchen: Kitchen) -> None:
    for pieces in (("<im", "age>"), ("a <", "imag", "e> b"), ("<|us", "er|>"), ("<image", ">", PICTURE)):
        texts = [piece for piece in pieces if isinstance(piece, str)]
        ids = await ids_of(kitchen, said("user", *pieces))
        assert ids.count(IMAGE_ID) == 4 * (PICTURE in pieces) and ids.count(SPECIALS.index("<|user|>")) == 1
        shown = kitchen.preprocessor.tokenizer.decode(ids, skip_special_tokens=False)
        assert shown.startswith("<s><|user|>" + "".join(texts))


async def test_trimmed_parts_do_not_make_a_mark_either(
    make_preprocessor: Callable[..., Kitchen], tmp_path: Path
) -> None:
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}<|user|>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}</s>{% endfor %}"
    )
    kitchen = make_preprocessor(chat_template_path=str(tmp_path / "t.jinja"))
    ids = await ids_of(kitchen, said("user", "<im \n", " age> "))
    assert IMAGE_ID not in ids and kitchen.preprocessor.tokenizer.decode(ids) == "<image>"


WEATHER = {
    "type": "function",
    "function": {"name": "f", "description": "Reads <image>.", "parameters": {"<image>": {}}},
}
CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\u003cimage>"}'}}]
BROKEN = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": <image>'}}]
ANYWHERE: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([said("user", "a")], {"tools": (WEATHER,)}),
    ([said("user", "a")], {"variables": {"enable_thinking": ["x <image>"], "note": "<image>"}}),
    ([said("user", "a"), {"role": "assistant", "content": None, "tool_calls": CALLS}, said("tool", "b")], {}),
    ([said("user", "a"), {"role": "assistant", "content": None, "tool_calls": BROKEN}, said("tool", "b")], {}),
    ([said("user", "a"), said("tool", "<image><url>a.png</url></image>", tool_call_id="c1")], {}),
    ([said("user", "a"), said("tool", "b", tool_call_id="<image>", name="<image>")], {}),
    ([said("system", "<image>"), said("user", "a", note="<image>", other={"<image>": ["<image>"]})], {}),
]


@pytest.mark.parametrize(("messages", "options"), ANYWHERE)
async def test_every_text_of_a_conversation_may_quote(
    messages: list[dict[str, Any]],
    options: dict[str, Any],
    make_preprocessor: Callable[..., Kitchen],
    tmp_path: Path,
) -> None:
    (tmp_path / "t.jinja").write_text(
        QWEN_LIKE + "{{ note }}{% for m in messages %}{{ m.note }}{{ m.other | tojson if m.other }}{% endfor %}"
    )
    kitchen = make_preprocessor(chat_template_path=str(tmp_path / "t.jinja"), max_model_len=2048)
    preprocessor = kitchen.preprocessor
    ids = await ids_of(kitchen, *messages, template=TemplateOptions(**options))
    assert IMAGE_ID not in ids and ids == await preprocessor.tokenize(
        asked(messages=messages, template=TemplateOptions(**options))
    )
    shown = preprocessor.tokenizer.decode(ids, skip_special_tokens=False)
    chat = preprocessor._tool_template if options.get("tools") else preprocessor._template
    typed = [chat.with_known_fields(message) for message in asked(messages=messages).messages]
    assert "<image>" in shown and shown.removeprefix("<s>") == chat.render(typed, TemplateOptions(**options))


async def test_texts_without_marks_have_no_detour_and_the_same_ids(kitchen: Kitchen) -> None:
    template, tokenizer = kitchen.preprocessor._template, kitchen.preprocessor.tokenizer
    plain = [said("user", "the < cat <|user |> image>")]
    assert template.quoting_of(asked(messages=plain).messages) is None
    for text in ("the cat", "def f(x):\n    return x", "e\u0301 \U0001f389 1 < 2"):
        before = await ids_of(kitchen, said("user", text), said("assistant", "ok"), said("user", "a"))
        after = await ids_of(kitchen, said("user", text), said("assistant", "ok"), said("user", "<s>"))
        common = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))))
        assert tokenizer.decode(before[common:]) in ("a", "a</s>") or common == len(before) - 3, text


async def test_raw_prompts_are_parsed_and_say_what_a_placeholder_is(kitchen: Kitchen) -> None:
    with pytest.raises(InvalidRequest, match=r"1 image placeholders.*0 images.*raw prompt <image> stands for one"):
        await kitchen.prepare("an <image>", raw=True)
    prepared = await kitchen.prepare("a<|user|><image>", noise(9, 9), raw=True)
    assert prepared.request.prompt_token_ids.count(SPECIALS.index("<|user|>")) == 1


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_like", "wordpiece"])
def test_the_other_spelling_gives_the_same_ids_for_every_kind_of_tokenizer(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    quoting = Quoting(tokenizer, SPECIALS)
    for text in ("<s>the cat<image> sat</s><|user|>on <image>", " the", "<image>", "", "the</s>", "<image>x " * 700):
        for special in (False, True):
            expected = tokenizer.encode(text, add_special_tokens=special)
            assert quoting.encode(quoting.spell_rendered(text), add_special_tokens=special) == expected
    hidden = quoting.spell_rendered("<|user|>" + quoting.hide("the <image> sat") + "<image></s>")
    ids = quoting.encode(hidden, add_special_tokens=False)
    assert [ids.count(IMAGE_ID + (kind != "byte_level")), len(set(ids) & tokenizer.special_ids)] == [1, 3]


@pytest.mark.quick("LLaVA-1.5]", "Qwen3-VL", "[Mistral]", "[Llama 3]")
@pytest.mark.parametrize("name", CASES)
def test_published_templates_tell_their_marks_from_quoted_ones(
    sides_of: Callable[[str], Sides],  # noqa: F811
    loop: asyncio.AbstractEventLoop,  # noqa: F811
    name: str,
) -> None:
    sides, published = sides_of(name), CHECKPOINTS[name]
    tokenizer, special = sides.tokenizer, sides.tokenizer.special_ids
    marks = sorted(sides.preprocessor._template._quoting._own)
    assert tokenizer.bos_token in (*marks, None) and {published.image, published.video} - {""} <= set(marks)

    def chat(text: str) -> list[Any]:
        content = [{"type": "text", "text": f"a {text} b"}] if published.parts else f"a {text} b"
        media = [{"type": "image", "image": noise(40, 32)}] if published.image else []
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
        return [*turns, {"role": "user", "content": [*media, *content] if published.parts else content}]

    async def prepared(text: str) -> list[int]:
        request = (await sides.preprocessor.prepare(RequestId(1), asked(messages=chat(text)))).request
        return list(request.prompt_token_ids)

    without = loop.run_until_complete(prepared("x"))
    for mark in marks:
        found = loop.run_until_complete(prepared(mark))
        assert [id for id in found if id in special] == [id for id in without if id in special], mark
        assert tokenizer.decode(found).replace(mark, "x") == tokenizer.decode(without), mark

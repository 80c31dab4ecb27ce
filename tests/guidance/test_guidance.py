"""Texts that a compiled grammar allows, with reasoning before them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken

from hydra_engine.core.grammar import Grammar
from hydra_engine.errors import InvalidRequest
from hydra_engine.guidance.guide import GrammarError, Guide
from tests.guidance.grammar_texts import DEMO, EOS, Texts
from tests.preprocess.conftest import build_sentencepiece_like

KINDS_OF_MARKS = [
    pytest.param(True, id="special"),
    pytest.param(False, id="added", marks=pytest.mark.slow),
    pytest.param(None, id="text"),
]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
OBJECT = {"type": "object", "properties": {"a": {"enum": ["y", "n"]}}, "required": ["a"], "additionalProperties": False}


def guide_with(folder: Path, *, special: bool | None) -> Texts:
    """The demo's tokenizer, to which marks were added as special tokens, as other ones (as Qwen's are), or not."""
    tokenizer = json.loads(DEMO.read_text())
    marks = {} if special is None else {mark: 641 + index for index, mark in enumerate(MARKS)}
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        like | {"id": token, "content": mark, "special": special} for mark, token in marks.items()
    ]
    file = folder / f"{special}.json"
    file.write_text(json.dumps(tokenizer))
    return Texts(file, marks)


@pytest.fixture(scope="module", params=KINDS_OF_MARKS)
def texts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return guide_with(tmp_path_factory.mktemp("tokenizers"), special=request.param)


FORMS = [
    (Grammar("json_schema", OBJECT), '{"a": "y"}', '{"a": "x"}'),
    (Grammar("json_object"), '{"a": [1, {}]}', "[]"),
    (Grammar("regex", "<[a-z]+>|yes"), "<thin>", "<thin"),
    (Grammar("choice", ["no", "yes"]), "no", "on"),
    (Grammar("lark", 'start: "(" start? ")"'), "(())", "(()"),
    (Grammar("lark", 'start: "a" "b"+\n%ignore " "'), "a b b", "a c"),
    (Grammar("ebnf", "root ::= [0-9]{2}"), "42", "4"),
]


@pytest.mark.quick("json_schema", "special-regex", "text-choice", "added-lark")
@pytest.mark.parametrize(("form", "right", "wrong"), FORMS, ids=lambda value: getattr(value, "kind", ""))
def test_reasoning_comes_before_every_form(texts: Texts, form: Grammar, right: str, wrong: str) -> None:
    opened = form.after_reasoning("<think>\n", "</think>", opened=True)
    closed = form.after_reasoning("<think>", "</think>", opened=False)
    for thought in ("", "Hm,\n {\"a\": 'x'} 😀 <think <b></b> or ", "a" * 80 + "</thin"):
        for space in ("", "\n", "\n\n \n"):
            assert texts.accepts(opened, f"{thought}</think>{space}{right}"), (thought, space)
            assert texts.accepts(closed, f"<think>{thought}</think>{space}{right}"), (thought, space)
            assert not texts.accepts(opened, f"{thought}</think>{space}{wrong}")
            assert not texts.accepts(closed, f"<think>{thought}</think>{space}{wrong}")
            assert not texts.accepts(opened, f"{thought}{space}{right}")
    assert texts.accepts(closed, right) and not texts.accepts(closed, wrong)
    assert not texts.accepts(closed, f"hm</think>{right}")
    assert not texts.accepts(opened, f"a</think>b</think>{right}")
    assert not texts.accepts(opened, "a</think>" + " " * 40 + right)


def test_text_that_spells_a_special_mark_does_not_end_the_reasoning(texts: Texts) -> None:
    """The answer's text could not be distinguished from the mark, so it is not allowed."""
    matcher = texts.guide.compile(Grammar("choice", ["no"]).after_reasoning("<think>", "</think>", opened=True))
    letters = [token for letter in "</think>" for token in texts.guide._tokenizer.tokenize_bytes(letter.encode())]
    matcher.accept(letters[:-1])
    assert matcher.allowed()[letters[-1]] == (not texts.marks)


def test_what_reasoning_does_to_a_grammar() -> None:
    form = Grammar("regex", "a", "regex")
    behind = form.after_reasoning(" <think>\n", "\n</think>", opened=False)
    assert (behind.kind, behind.source, behind.param) == ("regex", "a", "regex")
    assert behind.reasoning is not None and (behind.reasoning.start, behind.reasoning.end) == ("<think>", "</think>")
    assert behind.language != form.language
    assert behind.language != form.after_reasoning("<think>", "</think>", opened=True).language


@pytest.mark.parametrize("marks", [("", "x"), ("x", " "), ("x" * 200, "y")])
def test_marks_of_reasoning_are_bounded(marks: tuple[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="marks of reasoning have 1 to 128 characters"):
        Grammar("regex", "a", "regex").after_reasoning(*marks, opened=True)


def test_a_wrong_grammar_is_wrong_behind_reasoning_too(texts: Texts) -> None:
    with pytest.raises(GrammarError, match="unclosed character class"):
        texts.guide.compile(Grammar("regex", "[").after_reasoning("<think>", "</think>", opened=True))


# ---- texts that are special tokens of the tokenizer

SPECIAL = ["<s>", "<pad>", "<|end|>", "<|assistant|>", "<image>", "<tool_call>", "</think>"]


def model_text(texts: Texts, grammar: Grammar) -> str:
    """The text of a model that always takes the first allowed token, as the sampler gets the mask."""
    matcher, written = texts.guide.compile(grammar), b""
    while True:
        allowed = matcher.allowed()
        if allowed[EOS]:
            return written.decode()
        content, token = next(entry for entry in texts.vocabulary if allowed[entry[1]])
        matcher.accept([token])
        written += content


@pytest.mark.parametrize("text", SPECIAL)
def test_texts_of_special_tokens_are_texts(texts: Texts, text: str) -> None:
    quoted, old = json.dumps(text), f"a {text}{text} <b> b{text}"
    choice = json.dumps([old])
    closed = {"type": "object", "required": [text], "additionalProperties": False}
    ordinary = Texts(texts.file, {})  # which has no token for marks
    for grammar, written in (
        (Grammar("json_schema", {"const": old}), json.dumps(old)),
        (Grammar("json_schema", {"enum": [text]}), quoted),
        (Grammar("json_schema", closed | {"properties": {text: {"const": 1}}}), f"{{{quoted}: 1}}"),
        (Grammar("json_schema", {"type": "string", "pattern": f"^{re.escape(old)}$"}), json.dumps(old)),
        (Grammar("choice", choice), old),
        (Grammar("choice", json.dumps([text])), text),
        (Grammar("regex", re.escape(text)), text),
        (Grammar("lark", f"start: {quoted}"), text),
        (Grammar("ebnf", f"root ::= {quoted}"), text),
        (Grammar("choice", choice).after_reasoning("<think>", "x", opened=False), old),
    ):
        if grammar.reasoning is None:
            assert model_text(ordinary, grammar) == written, (grammar.kind, grammar.source)
        assert ordinary.accepts(grammar, written)


def test_special_tokens_that_a_grammar_names_are_tokens(texts: Texts) -> None:
    matcher = texts.guide.compile(Grammar("lark", "start: <|user|> <[5]>"))
    matcher.accept([4, 5])
    assert matcher.allowed()[EOS]


def test_texts_of_special_tokens_where_spaces_are_letters(tmp_path: Path) -> None:
    """Llama 2's kind of tokenizer, in which some special tokens take white space along."""
    backend = build_sentencepiece_like()
    backend.add_special_tokens([AddedToken("<image>", lstrip=True, rstrip=True, special=True)])
    file = tmp_path / "tokenizer.json"
    backend.save(str(file))
    guide, end = Guide(file, (backend.token_to_id("</s>"),)), backend.token_to_id("</s>")
    for text in ("<s>old</s> é", "the  <image> cat", "<unk>", "<0x41>"):
        matcher, written = guide.compile(Grammar("choice", json.dumps([text]))), []
        while not (allowed := matcher.allowed())[end]:
            written.append(int(allowed.argmax()))
            matcher.accept(written[-1:])
        assert backend.decode(written) == text and not {"<s>", "</s>", "<image>"} & {
            backend.id_to_token(token) for token in written
        }

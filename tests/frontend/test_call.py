"""Arguments of Python callers become typed calls: open files, vLLM's prompts, and habits that get a sentence."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.core.call import GenerationCall
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.errors import InvalidRequest
from hydra_engine.frontend.call import is_chat, make_call, media_parts, with_prompt

EMPTY = GenerationCall()


class Upload:
    """An upload as web frameworks have it: read() is a coroutine."""

    def read(self) -> object:
        return object()


def closed() -> io.BytesIO:
    file = io.BytesIO(b"a")
    file.close()
    return file


def test_open_files_are_read_from_their_start_and_at_once(tmp_path: Path) -> None:
    written = io.BytesIO()
    written.write(b"picture")  # its position is the end, as after Image.save
    path = tmp_path / "film"
    path.write_bytes(b"film")
    with path.open("rb") as film:
        images, videos = [written, written], [film, [written, b"frame"]]
        call = with_prompt(EMPTY, "What?", images, videos)  # type: ignore[arg-type]  # a list of files and of frames
    assert [part.source for part in call.media] == [b"picture", b"picture", b"film", [b"picture", b"frame"]]
    turn = {"role": "user", "content": [{"type": "image", "image": written}, {"type": "text", "text": "What?"}]}
    (message,) = with_prompt(EMPTY, [turn]).messages
    assert [part.source for part in message.media] == [b"picture"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (closed, "cannot be read: I/O operation on closed file"),
        (io.BytesIO, "an empty file"),
        (io.StringIO, "open as text; open it with mode 'rb'"),
        (lambda: io.BufferedWriter(io.BytesIO()), "open for writing; open it with mode 'rb'"),
        (Upload, r"read\(\) gives object; give its bytes"),
    ],
    ids=["closed", "empty", "text", "writing", "upload"],
)
def test_a_file_that_gives_no_bytes_gets_a_sentence(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^images\[1\] is .*{words}$") as caught:
        media_parts([b"a", make()], None)
    assert caught.value.param == "images[1]"


def test_prompts_in_the_form_of_vllm_are_raw_with_their_media() -> None:
    text = with_prompt(EMPTY, {"prompt": "<image>\nWhat?", "multi_modal_data": {"image": [b"a", b"b"], "video": b"c"}})
    assert (text.prompt, text.raw, [part.source for part in text.media]) == ("<image>\nWhat?", True, [b"a", b"b", b"c"])
    ids = with_prompt(EMPTY, {"prompt_token_ids": [1, 2], "prompt": "ab", "multi_modal_data": None}, b"a")
    assert (ids.prompt, ids.raw, [part.source for part in ids.media]) == ([1, 2], True, [b"a"])
    assert not is_chat([{"prompt": "a"}]) and is_chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("prompt", "images", "words"),
    [
        ({"prompt": "a", "multi_modal_data": {"audio": b"a"}}, None, "take out 'audio'"),
        ({"prompt": "a", "mm_processor_kwargs": {}}, None, "take out 'mm_processor_kwargs'"),
        ({"prompt": "a", "multi_modal_data": [b"a"]}, None, "multi_modal_data must be a dict"),
        ({"prompt": "a", "multi_modal_data": {"image": b"a"}}, b"b", "not both"),
        ({"promt": "a"}, None, "not dict without prompt or prompt_token_ids"),
        ({"role": "user", "content": "a"}, None, "not dict; put the message into a list"),
        (b"a", None, "a prompt must be text, .* not bytes"),
        ("a", [SamplingParams(), SamplingParams()], "one SamplingParams for all prompts"),
    ],
    ids=["audio", "options", "list", "twice", "typo", "message", "bytes", "samplings"],
)
def test_other_habits_get_a_sentence(prompt: Any, images: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        with_prompt(EMPTY, prompt, images)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("sampling", [SamplingParams()], r"SamplingParams\(\.\.\.\), one for all prompts, not list"),
        ("slo", 0.5, r"Slo\(ttft_s=\.\.\., tpot_s=\.\.\.\), not float"),
        ("template", {"tools": []}, r"TemplateOptions\(\.\.\.\), not dict"),
        ("pixels", 1000, r"PixelBudget\(\.\.\.\), not int"),
        ("raw", "no", "True or False, not str"),
        ("cache_salt", 5, "text, not int"),
        ("max_tokens", "4", "an integer between 1 and 1048576"),
        ("stop", 5, "a list, not int"),
        ("stop_token_ids", "a", "a list, not str"),
        ("allowed_token_ids", [[5]], "an integer between 0 and 2147483647"),
        ("logit_bias", [1], "a number for each token id"),
        ("ignore_eos", "no", "True or False, not str"),
        ("grammar", "[a-z]", r"Grammar\(\.\.\.\), not str"),
    ],
)
def test_an_option_of_a_wrong_type_gets_a_sentence(name: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} must (be|have) {words}$") as caught:
        make_call({name: value}, SamplingParams())
    assert caught.value.param == name


def test_none_for_a_list_is_an_empty_one() -> None:
    lists = ("stop", "stop_token_ids", "logit_bias", "allowed_token_ids")
    assert SamplingParams(**dict.fromkeys(lists)) == SamplingParams()

import asyncio
import base64
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hydra_engine.cluster import channel
from hydra_engine.core.call import ChatMessage, GenerationCall
from hydra_engine.core.ids import RequestId
from hydra_engine.core.prompting import MAX_PIXEL_BYTES, TemplateOptions
from hydra_engine.core.request import Slo
from hydra_engine.errors import (
    CODES,
    ConfigError,
    ContextLengthExceeded,
    InvalidImage,
    InvalidRequest,
    MediaFetchFailed,
    MediaForbidden,
    RequestError,
)
from hydra_engine.preprocess import preprocessor
from hydra_engine.preprocess.media import fetch, images
from hydra_engine.preprocess.text.tokenizer import Tokenizer, load_tokenizer
from tests.calls import asked
from tests.virtual_clock import VirtualClock

Encode = Callable[..., bytes]
Picture = Callable[..., Image.Image]
IMAGE_ID = 5


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def show(kitchen: Any, ids: tuple[int, ...]) -> str:
    return kitchen.preprocessor.tokenizer.decode(list(ids), skip_special_tokens=False)


async def test_a_text_becomes_a_request(kitchen: Any) -> None:
    slo = Slo(ttft_s=1.0)
    prepared = await kitchen.prepare(
        "the cat", sampling={"max_tokens": 7, "seed": 3}, slo=slo, arrival_s=12.5, cache_salt="s"
    )
    request = prepared.request
    assert show(kitchen, request.prompt_token_ids) == "<s><|user|>the cat</s><|assistant|>"
    assert (request.id, request.seed, request.max_new_tokens, request.arrival_s) == (1, 3, 7, 12.5)
    assert (request.eos_token_ids, request.slo, request.cache_salt) == ((1,), slo, "s")
    assert prepared.pixels == () and [span.stage for span in prepared.spans] == ["tokenize"]


async def test_pixels_that_no_message_can_hold_are_refused(
    kitchen: Any, picture: Picture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = [picture(40, 30, seed=seed) for seed in (1, 2)]
    size = sum(len(one.data) for one in (await kitchen.prepare("a", images=pictures)).pixels)
    assert channel.MAX_FRAME_BYTES - MAX_PIXEL_BYTES == 24 << 20, "room for the rest of the request"
    monkeypatch.setattr(preprocessor, "MAX_PIXEL_BYTES", size)
    assert len((await kitchen.prepare("a", images=pictures)).pixels) == 2
    monkeypatch.setattr(preprocessor, "MAX_PIXEL_BYTES", size - 1)
    with pytest.raises(InvalidRequest, match="MiB of pixels; at most 0 MiB are allowed: give fewer"):
        await kitchen.prepare("a", images=pictures)


async def test_placeholders_expand_and_items_say_where(kitchen: Any, picture: Picture, encoded: Encode) -> None:
    one, two = picture(40, 30, seed=1), picture(30, 50, seed=2)
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "image", "image": one}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(encoded(two))}}]},
    ]
    prepared = await kitchen.prepare(messages=messages)
    ids, items = prepared.request.prompt_token_ids, prepared.request.images
    assert show(kitchen, ids) == (
        "<s><|user|>a" + "<image>" * 4 + "b</s><|assistant|>ok</s><|user|>" + "<image>" * 4 + "</s><|assistant|>"
    )
    assert [i for i, id in enumerate(ids) if id == IMAGE_ID] == [
        p for item in items for p in range(item.start, item.end)
    ]
    assert [(i.width, i.height) for i in items] == [(40, 30), (30, 50)]
    assert [(i.num_patches, i.num_tokens, i.grid) for i in items] == [(4, 4, (1, 2, 2))] * 2
    assert [p.digest for p in prepared.pixels] == [i.digest for i in items] and items[0].digest != items[1].digest
    assert prepared.request.num_image_tokens == 8
    assert prepared.request.max_new_tokens == 256 - len(ids)
    assert [span.stage for span in prepared.spans] == ["tokenize", "preprocess", "preprocess"]
    assert [span.tokens for span in prepared.spans[1:]] == [4, 4]


async def test_one_picture_in_every_form_is_the_same_picture(
    make_preprocessor: Any, picture: Picture, encoded: Encode, tmp_path: Path
) -> None:
    image = picture(40, 30)
    data, path = encoded(image), tmp_path / "p.png"
    path.write_bytes(data)
    files = [data, bytearray(data), data_url(data), path, str(path), path.as_uri()]
    kitchen = make_preprocessor(media={"local_files": True})
    prepared = await kitchen.prepare("x", [*files, image, np.asarray(image)])
    assert len({payload.data for payload in prepared.pixels}) == 1
    assert len({payload.digest for payload in prepared.pixels[: len(files)]}) == 1
    assert len({payload.digest for payload in prepared.pixels[len(files) :]}) == 1
    assert (await kitchen.prepare("x", path)).pixels == prepared.pixels[:1]
    rotated = await kitchen.prepare("x", image.transpose(Image.Transpose.ROTATE_180))
    assert rotated.pixels[0].digest not in {payload.digest for payload in prepared.pixels}


async def test_raw_prompts_and_token_ids_bring_their_own_placeholders(kitchen: Any, picture: Picture) -> None:
    images = [picture(9, 9, seed=1), picture(9, 9, seed=2)]
    prepared = await kitchen.prepare("the<image>cat<image>", images, raw=True)
    assert show(kitchen, prepared.request.prompt_token_ids) == "<s>the" + "<image>" * 4 + "cat" + "<image>" * 4
    from_ids = await kitchen.prepare([0, 9, IMAGE_ID, IMAGE_ID, 9], images)
    assert from_ids.request.prompt_token_ids == (0, 9, *[IMAGE_ID] * 8, 9)
    assert [item.start for item in from_ids.request.images] == [2, 6]
    for prompt, given, options in (
        ("the <image>", [], {"raw": True}),
        ("the <image><image>", images[:1], {"raw": True}),
        ("the", images[:1], {"raw": True}),
        ([IMAGE_ID], images, {}),
        ([9], images[:1], {}),
    ):
        with pytest.raises(InvalidRequest, match="placeholder"):
            await kitchen.prepare(prompt, given, **options)


async def test_lengths_are_checked_with_the_words_that_clients_look_for(
    make_preprocessor: Any, picture: Picture
) -> None:
    kitchen = make_preprocessor(max_model_len=20)
    ids = [9] * 12
    assert (await kitchen.prepare(ids)).request.max_new_tokens == 8
    assert (await kitchen.prepare(ids, sampling={"max_tokens": 8})).request.max_new_tokens == 8
    assert (await kitchen.prepare([9] * 19)).request.max_new_tokens == 1
    words = (
        r"This model's maximum context length is 20 tokens\. However, you requested {} tokens \({} in the prompt, {} "
        r"for the completion\)\. The prompt is too long, or the completion\."
    )
    for prompt, sampling, numbers in (
        (ids, {"max_tokens": 9}, (21, 12, 9)),
        (ids, {"min_tokens": 9}, (21, 12, 9)),
        ([9] * 20, {}, (21, 20, 1)),
        ([9] * 100_000, {}, (100_001, 100_000, 1)),
    ):
        with pytest.raises(ContextLengthExceeded, match=words.format(*numbers)) as caught:
            await kitchen.prepare(prompt, sampling=sampling)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    for place, param in (("messages[1]", "messages"), ("input", "input")):  # of Responses
        talk = [ChatMessage("system", "a", "instructions"), ChatMessage("user", "the cat " * 20, place)]
        call = GenerationCall(messages=tuple(talk))
        with pytest.raises(ContextLengthExceeded) as caught:
            await kitchen.preprocessor.prepare(RequestId(1), call)
        assert caught.value.param == param
    with pytest.raises(ContextLengthExceeded, match=r"requested 21 tokens \(20 in the prompt"):
        await kitchen.prepare([IMAGE_ID] + [9] * 16, picture(5, 5))  # fits only until it is expanded


async def test_endless_texts_are_refused_before_they_are_tokenised(
    kitchen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", None)
    huge = "x" * 20_000_000
    for options in ({"prompt": huge}, {"prompt": huge, "raw": True}, {"messages": [{"role": "user", "content": huge}]}):
        with pytest.raises(
            ContextLengthExceeded, match=r"maximum context length is 256 tokens\..* prompt is too long\."
        ):
            await kitchen.prepare(**options)


async def test_long_texts_are_tokenised_off_the_loop(make_preprocessor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    real = Tokenizer.encode

    def spy(self: Tokenizer, text: str, **options: Any) -> list[int]:
        threads.append(threading.current_thread() is threading.main_thread())
        return real(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", spy)
    kitchen = make_preprocessor(max_model_len=10_000)
    await kitchen.prepare("the cat " * 10)
    await kitchen.prepare("the cat " * 300)
    assert threads == [True, False]


async def test_pictures_are_decoded_off_the_loop(
    kitchen: Any, picture: Picture, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    real = images.from_pil

    def spy(*args: Any) -> Image.Image:
        threads.add(threading.current_thread().name)
        return real(*args)

    monkeypatch.setattr(images, "from_pil", spy)
    await kitchen.prepare("x", [picture(9, 9)] * 4)
    assert threads and all(name.startswith("preprocess-image") for name in threads)


async def test_counts_and_addresses_are_checked_before_anything_opens(
    make_preprocessor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kitchen = make_preprocessor(media={"max_images": 3})
    opened = []
    monkeypatch.setattr(fetch.MediaFetcher, "fetch", lambda self, source: opened.append(source))
    monkeypatch.setattr(images, "inspected", lambda *args: opened.append(args))
    for pictures in (["http://h.test/a"] * 1000, [b"x"] * 4, ["data:image/png;base64,AAAA"] * 1000):
        with pytest.raises(InvalidRequest) as caught:
            await kitchen.prepare("x", pictures)
        assert caught.value.code == "too_many_images" and caught.value.param == "images[3]"
    with pytest.raises(MediaForbidden) as forbidden:
        await kitchen.prepare("x", ["http://h.test/a", "http://127.0.0.1/"])
    assert forbidden.value.param == "images[1]"
    with pytest.raises(ContextLengthExceeded):
        await kitchen.prepare([IMAGE_ID] + [9] * 300, "http://h.test/a")
    assert opened == []


async def test_errors_of_pictures_name_their_place(kitchen: Any, picture: Picture, encoded: Encode) -> None:
    good = encoded(picture(9, 9))
    messages = [
        {"role": "user", "content": "x"},
        {
            "role": "user",
            "content": [{"type": "image", "image": good}, {"type": "image_url", "image_url": data_url(b"no")}],
        },
    ]
    with pytest.raises(InvalidImage) as caught:
        await kitchen.prepare(messages=messages)
    assert caught.value.param == "messages[1].content[1].image_url"
    assert caught.value.code == "unsupported_image_format"
    with pytest.raises(InvalidImage) as caught:
        await kitchen.prepare("x", [good, good[: len(good) // 2]])
    assert (caught.value.param, caught.value.code) == ("images[1]", "image_decode_failed")


async def test_text_models_take_no_pictures(make_preprocessor: Any, picture: Picture) -> None:
    kitchen = make_preprocessor(vision=False)
    assert (await kitchen.prepare("an <image> tag")).request.images == ()
    with pytest.raises(InvalidRequest, match="takes no images"):
        await kitchen.prepare("x", picture(9, 9))


WRONG = [
    ({}, "prompt"),
    ({"messages": [{"role": "user", "content": "x"}], "images": b"x"}, "images"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, 2.0]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": "x", "images": 7}, "images"),
    ({"prompt": "x", "images": [None]}, "images[0]"),
    ({"prompt": "x", "images": "/etc/passwd"}, "images"),
    ({"prompt": "lone \ud800 surrogate"}, "prompt"),
    ({"prompt": "\udc00" * 3000}, "prompt"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
]


@pytest.mark.parametrize(("options", "param"), WRONG)
async def test_wrong_requests_are_refused_by_field(kitchen: Any, options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await kitchen.prepare(**options)
    assert caught.value.code is None or caught.value.code in CODES
    assert len(caught.value.message) < 200 and not re.search(r"0x|/etc", caught.value.message)
    assert caught.value.param == param


async def test_an_empty_prompt_is_refused_where_nothing_remains(kitchen: Any) -> None:
    assert (await kitchen.prepare("", raw=True)).request.prompt_token_ids == (0,)  # the start token alone
    with pytest.raises(InvalidRequest, match="empty"):
        await kitchen.prepare([])
    assert (
        await kitchen.preprocessor.tokenize(asked("", raw=True, template=TemplateOptions(add_special_tokens=False)))
        == []
    )


async def test_seeds_are_drawn_in_the_same_order_every_time(make_preprocessor: Any) -> None:
    async def draw(seed: int) -> list[int]:
        kitchen = make_preprocessor(seed=seed)
        return [(await kitchen.prepare("x", sampling={"seed": s})).request.seed for s in (None, 5, None, -1, -1, -2)]

    first = await draw(0)
    assert first == await draw(0) and first[1] == 5 and 0 <= first[5] < 1 << 63
    assert len({first[index] for index in (0, 2, 3, 4)}) == 4, "-1 asks for a new one, as in vLLM"
    assert await draw(1) != first


async def test_end_tokens_of_spec_and_tokenizer_are_joined(make_preprocessor: Any) -> None:
    kitchen = make_preprocessor()
    assert (await kitchen.prepare("x")).request.eos_token_ids == (1,)


async def test_an_operators_template_replaces_the_models(make_preprocessor: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("Q:{{ messages[0]['content'] }} A:")
    kitchen = make_preprocessor(chat_template_path=str(path))
    assert show(kitchen, (await kitchen.prepare("the cat")).request.prompt_token_ids) == "<s>Q:the cat A:"
    with pytest.raises(ConfigError, match=r"cannot read the chat template \S+/missing: No such file or directory"):
        make_preprocessor(chat_template_path=str(tmp_path / "missing"))


async def test_a_model_without_template_still_takes_raw_prompts(
    make_preprocessor: Any, model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    kitchen = make_preprocessor(tokenizer=load_tokenizer(tmp_path))
    assert (await kitchen.prepare("the cat", raw=True)).request.num_prompt > 1
    with pytest.raises(InvalidRequest, match="--chat-template"):
        await kitchen.prepare("the cat")


async def test_tokenize_shows_the_ids_without_opening_pictures(kitchen: Any) -> None:
    preprocessor = kitchen.preprocessor
    plain, marked = (TemplateOptions(add_special_tokens=choice) for choice in (False, True))
    without = await preprocessor.tokenize(asked("the cat", raw=True, template=plain))
    assert await preprocessor.tokenize(asked("the cat", raw=True)) == [0, *without]
    assert await preprocessor.tokenize(asked("the cat", raw=True, template=marked)) == [0, *without]
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": "http://h.test/x"}]}]
    shown = "<s><|user|><image></s><|assistant|>"
    for options, expected in ((None, shown), (plain, shown), (marked, f"<s>{shown}")):  # its template writes <s>
        assert show(kitchen, await preprocessor.tokenize(asked(messages=messages, template=options))) == expected
    ids = await preprocessor.tokenize(asked(messages=messages, template=TemplateOptions(add_generation_prompt=False)))
    assert show(kitchen, ids) == "<s><|user|><image></s>"


async def test_spans_are_stamped_on_the_given_clock(make_preprocessor: Any, picture: Picture) -> None:
    clock = VirtualClock(100.0)
    prepared = await make_preprocessor(clock=clock).prepare("x", picture(9, 9))
    assert prepared.request.arrival_s == 100.0
    assert all((span.start_s, span.end_s, span.lane) == (100.0, 100.0, "front") for span in prepared.spans)


async def test_fetches_are_spans_and_their_failures_the_requests(
    make_preprocessor: Any, encoded: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(self: Any, source: Any, lease: Any) -> bytes:
        if "bad" in str(source.url):
            raise MediaFetchFailed("gone")
        return encoded()

    monkeypatch.setattr(fetch.MediaFetcher, "fetch", answer)
    kitchen = make_preprocessor()
    prepared = await kitchen.prepare("x", "https://h.test/good")
    assert [span.stage for span in prepared.spans] == ["tokenize", "fetch", "preprocess"]
    with pytest.raises(MediaFetchFailed, match="gone") as caught:
        await kitchen.prepare("x", ["https://h.test/good", "https://h.test/bad"])
    assert caught.value.param == "images[1]"


async def test_cancelling_stops_every_fetch(make_preprocessor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running, cancelled = [], []

    async def hang(self: Any, source: Any, lease: Any) -> bytes:
        running.append(source)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(source)
            raise
        return b""

    monkeypatch.setattr(fetch.MediaFetcher, "fetch", hang)
    kitchen = make_preprocessor()
    before = len(asyncio.all_tasks())
    task = asyncio.create_task(kitchen.prepare("x", [f"https://h.test/{i}" for i in range(5)]))
    async with asyncio.timeout(30):
        while len(running) < 5:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(cancelled) == 5 and len(asyncio.all_tasks()) == before


async def test_one_failure_stops_the_other_pictures(make_preprocessor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    async def answer(self: Any, source: Any, lease: Any) -> bytes:
        if "bad" in str(source.url):
            raise MediaFetchFailed("gone")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(source)
        return b""

    monkeypatch.setattr(fetch.MediaFetcher, "fetch", answer)
    with pytest.raises(MediaFetchFailed):
        await make_preprocessor().prepare("x", ["https://h.test/1", "https://h.test/2", "https://h.test/bad"])
    assert len(ended) == 2


async def test_the_loop_stays_free_while_large_pictures_are_read(make_preprocessor: Any, encoded: Encode) -> None:
    kitchen = make_preprocessor()
    webp = encoded(Image.new("RGBA", (2000, 2000), (9, 9, 9, 9)), "WEBP", lossless=True, method=0)
    url = data_url(encoded(Image.effect_noise((3000, 2500), 50), "JPEG", quality=90))
    turns: list[float] = []  # in processor time of the loop's thread: the clock's depends on what else runs here

    async def watch() -> None:
        while True:
            begin = time.thread_time()
            await asyncio.sleep(0.005)
            turns.append(time.thread_time() - begin)

    watcher = asyncio.create_task(watch())
    await kitchen.prepare("x", [url, webp, url])
    watcher.cancel()
    assert len(turns) > 5 and max(turns) < 0.03, "reading one of them takes longer"


async def test_requests_mixed_with_broken_ones_are_untouched(kitchen: Any, picture: Picture, encoded: Encode) -> None:
    good = encoded(picture(40, 30))
    alone = (await kitchen.prepare("the cat", good)).pixels

    async def broken(index: int) -> None:
        with pytest.raises(RequestError):
            await kitchen.prepare("x", good[: 20 + index])

    results = await asyncio.gather(
        *(kitchen.prepare("the cat", good) for _ in range(20)), *(broken(index) for index in range(40))
    )
    assert all(result.pixels == alone for result in results[:20])


async def test_long_lists_of_tokens_are_spelled_off_the_loop_in_turn(
    make_preprocessor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocessor = make_preprocessor().preprocessor
    threads: list[str] = []
    clients: list[str] = []
    decode, run = preprocessor.tokenizer.decode, preprocessor._decodes.run

    def decoded(*args: Any, **options: Any) -> str:
        threads.append(threading.current_thread().name)
        return str(decode(*args, **options))

    async def counted(client: str, *work: Any) -> Any:
        clients.append(client)
        return await run(client, *work)

    monkeypatch.setattr(preprocessor.tokenizer, "decode", decoded)
    monkeypatch.setattr(preprocessor._decodes, "run", counted)
    short, long = [5, 6, 7], [5, 6, 7] * 1000
    assert await preprocessor.detokenize(long, "bob") == decode(long, skip_special_tokens=False)
    assert await preprocessor.detokenize(short) == decode(short, skip_special_tokens=False)
    assert threads[0].startswith("preprocess-text") and threads[1] == threading.current_thread().name
    assert clients == ["bob"]
    for wrong in (short, long):
        with pytest.raises(InvalidRequest, match="token ids must be between 0"):
            await preprocessor.detokenize([*wrong, preprocessor.tokenizer.vocab_size], "bob")

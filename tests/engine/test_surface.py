"""The embedded API: shapes follow the input, errors carry their sentence, handles can be used from anywhere."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hydra_engine import Engine, SamplingParams
from hydra_engine.cluster.member import ClusterListener
from hydra_engine.cluster.supervisor import Supervisor
from hydra_engine.core.outputs import FinishReason
from hydra_engine.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthExceeded,
    EngineClosed,
    InvalidImage,
    InvalidRequest,
    MediaFetchFailed,
    RequestAborted,
)
from hydra_engine.frontend.call import SamplingOptions
from hydra_engine.preprocess.media.opening import Decoders
from tests.engine.conftest import EngineFactory, assert_at_rest, picture

SHORT = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


def test_one_prompt_gives_one_result(engine: Engine) -> None:
    result = engine.generate("Hello", **SHORT)
    assert result.finish_reason is FinishReason.LENGTH
    assert len(result.token_ids) == 4
    assert result.usage.completion_tokens == 4
    assert result.metrics.ttft_s > 0


def test_a_list_gives_a_list_in_order(engine: Engine) -> None:
    prompts = [f"number {i}" for i in range(20)]
    results = engine.generate(prompts, images=[picture(i) if i % 3 == 0 else None for i in range(20)], **SHORT)
    assert [r.usage.num_images for r in results] == [1 if i % 3 == 0 else 0 for i in range(20)]
    single = engine.generate(prompts[7], **SHORT)
    assert results[7].token_ids == single.token_ids


def test_pictures_in_every_form_are_the_same_picture(engine: Engine, tmp_path: Path) -> None:
    image = picture(3)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    path = tmp_path / "a.png"
    path.write_bytes(buffer.getvalue())
    import base64

    uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    forms = [image, path, str(path), buffer.getvalue(), uri, np.asarray(image), *os.scandir(tmp_path), buffer]
    tokens = {engine.generate("What?", form, **SHORT).token_ids for form in forms}
    with path.open("rb") as file:
        handle = engine.submit("What?", file, **SHORT)
    tokens.add(handle.result(60).token_ids)  # the file is closed by now
    assert len(tokens) == 1


def test_chat_takes_messages(engine: Engine) -> None:
    messages = [
        {
            "role": "user",
            "content": [{"type": "image", "image": picture(1)}, {"type": "text", "text": "What is this?"}],
        }
    ]
    assert engine.chat(messages, **SHORT).token_ids == engine.generate("What is this?", picture(1), **SHORT).token_ids
    assert len(engine.chat([messages, messages], **SHORT)) == 2


def test_pictures_beside_messages_are_pictures_in_them(engine: Engine) -> None:
    one, two = picture(1), picture(2)
    inside = [
        {"role": "user", "content": [{"type": "image", "image": one}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "A picture."},
        {"role": "user", "content": [{"type": "image", "image": two}, {"type": "text", "text": "And this?"}]},
    ]
    places = [inside[0] | {"content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}, inside[1]]
    places.append(inside[2] | {"content": [{"type": "image"}, {"type": "text", "text": "And this?"}]})
    at_the_end = [*inside[:2], {"role": "user", "content": "And this?"}]
    as_in_vllm = [{"type": "image_pil", "image_pil": two}, {"type": "text", "text": "And this?"}]
    expected = engine.chat(inside, **SHORT)
    assert expected.usage.num_images == 2
    assert engine.chat(places, images=[one, two], **SHORT).token_ids == expected.token_ids
    assert engine.chat(at_the_end, images=two, **SHORT).token_ids == expected.token_ids
    assert engine.chat([*inside[:2], {"role": "user", "content": as_in_vllm}], **SHORT).token_ids == expected.token_ids
    several = engine.chat([places, at_the_end], images=[[one, two], [two]], **SHORT)
    assert [result.token_ids for result in several] == [expected.token_ids] * 2
    assert places[0]["content"][0] == {"type": "image"}  # the caller's own messages stay what they were


@pytest.mark.parametrize(
    ("messages", "images", "param", "words"),
    [
        ([{"role": "user", "content": [{"type": "image"}]}], [1, 2], "images[1]", "more images than places"),
        ([{"role": "user", "content": [{"type": "image"}]}], None, "messages[0].content[0].image", "missing"),
        ([{"role": "system", "content": "a"}], picture(1), "images", "no user message"),
        ([{"role": "user", "content": 5}], picture(1), "messages[0].content[1].text", "must be a string"),
        ([{"role": "user", "content": [{"type": "image"}]}], [b"no"], "images[0]", "unsupported format"),
        ([{"role": "user", "content": [{"type": "image_embeds"}]}], None, "messages[0].content[0]", "picture itself"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_pictures_beside_messages_that_have_no_place(
    engine: Engine, messages: list, images: object, param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        engine.chat(messages, images=images, **SHORT)
    assert caught.value.param == param


def test_a_wrong_conversation_fails_alone(engine: Engine) -> None:
    good, bad = [{"role": "user", "content": "Hello"}], [{"role": "king", "content": "Hello"}]
    well, failed = engine.chat([good, bad], on_error="return", **SHORT)
    assert well.error is None and len(well.token_ids) == 4
    assert failed.error is not None and (failed.error.param, failed.error.index) == ("messages[0].role", 1)


def test_prompts_in_the_form_of_vllm_are_answered(engine: Engine) -> None:
    text = "USER: <image>\nWhat is this? ASSISTANT:"
    expected = engine.generate(text, picture(1), raw=True, **SHORT).token_ids
    image = {"multi_modal_data": {"image": picture(1)}}
    forms: list[dict] = [{"prompt": text} | image, {"prompt_token_ids": engine.tokenize(text)} | image]
    assert [result.token_ids for result in engine.generate(forms, **SHORT)] == [expected] * 2
    assert (
        engine.generate(forms[0], **SHORT).token_ids == engine.submit(forms[0], **SHORT).result().token_ids == expected
    )
    sampling = SamplingParams(**SHORT)
    assert engine.generate(forms, sampling)[1].token_ids == expected
    assert engine.generate(text, picture(1), raw=True, sampling_params=sampling).token_ids == expected
    assert engine.submit(forms[0], sampling).result().token_ids == expected
    image["multi_modal_data"]["audio"] = picture(2)
    failed = engine.generate([text, {"prompt": text} | image], [picture(1), None], on_error="return", **SHORT)[1].error
    assert failed is not None and failed.index == 1 and "'audio'" in failed.message


def test_a_stream_joins_to_the_text(engine: Engine) -> None:
    pieces = list(engine.stream("Tell me", temperature=0, max_tokens=20, ignore_eos=True))
    assert pieces[-1].result is not None
    assert "".join(p.text for p in pieces) == pieces[-1].result.text
    assert sum(len(p.token_ids) for p in pieces) == 20


async def test_the_async_forms_work_in_a_running_loop(make_engine: EngineFactory) -> None:
    engine = await asyncio.to_thread(make_engine)
    blocking = engine.generate("Hello", **SHORT)  # a blocking call inside a running loop, as in a notebook
    assert (await engine.agenerate("Hello", **SHORT)).token_ids == blocking.token_ids
    text = "".join([piece.text async for piece in engine.astream("Hello", **SHORT)])
    assert text == blocking.text
    for handle in (engine.submit("Hello", **SHORT), await engine.asubmit("Hello", **SHORT)):
        assert (await handle).token_ids == blocking.token_ids
        assert handle.result().text == blocking.text


async def test_a_handle_can_be_cancelled_while_it_is_read(make_engine: EngineFactory) -> None:
    engine = await asyncio.to_thread(make_engine)
    handle = engine.submit("Go on", temperature=0, max_tokens=300, ignore_eos=True)
    seen = 0
    with pytest.raises(RequestAborted):
        async for _ in handle:
            seen += 1
            if seen == 3:
                handle.cancel()
    assert 3 <= seen < 300
    await asyncio.to_thread(assert_at_rest, engine)


def test_logprobs(engine: Engine) -> None:
    result = engine.generate("Hello", logprobs=3, **SHORT)
    assert len(result.logprobs) == 4
    for entry, token in zip(result.logprobs, result.token_ids, strict=True):
        assert entry.token_id == token and entry.rank == 1 and len(entry.top) == 3
        assert entry.logprob == entry.top[0][2] <= 0


def test_stop_strings_end_and_disappear(engine: Engine) -> None:
    full = engine.generate("Hello", temperature=0, max_tokens=30, ignore_eos=True)
    middle = full.text[len(full.text) // 2 :][:3]
    stopped = engine.generate("Hello", temperature=0, max_tokens=30, ignore_eos=True, stop=[middle])
    assert stopped.finish_reason is FinishReason.STOP and stopped.stop_reason == middle
    assert stopped.text == full.text[: full.text.index(middle)]
    assert_at_rest(engine)


def test_stop_token_ids_end(engine: Engine) -> None:
    full = engine.generate("Hello", temperature=0, max_tokens=30, ignore_eos=True)
    stop = full.token_ids[5]
    stopped = engine.generate("Hello", temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=[stop])
    assert stopped.token_ids == full.token_ids[: full.token_ids.index(stop) + 1]
    assert stopped.finish_reason is FinishReason.STOP and stopped.stop_reason == stop


def test_one_bad_picture_does_not_spoil_the_batch(engine: Engine) -> None:
    images = [picture(0), b"not a picture", picture(2)]
    results = engine.generate(["a", "b", "c"], images=images, on_error="return", **SHORT)
    assert [r.error is None for r in results] == [True, False, True]
    assert isinstance(results[1].error, InvalidImage) and results[1].error.index == 1
    with pytest.raises(InvalidImage) as caught:
        engine.generate(["a", "b", "c"], images=images, **SHORT)
    assert caught.value.index == 1 and caught.value.__notes__ == ["the other requests have ended"]


@pytest.mark.parametrize("images", [picture(0), [picture(0)], (1, 2, 3)], ids=["one", "list", "tuple"])
def test_a_list_of_prompts_wants_an_entry_for_each(engine: Engine, images: object) -> None:
    with pytest.raises(InvalidRequest, match=r"2 prompts but .* in images; give one entry for each prompt"):
        engine.generate(["a", "b"], images=images, **SHORT)


def test_an_error_names_the_file_its_place_and_the_prompt(engine: Engine, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n")
    seen = picture(1)
    batch = [None, [seen, seen, "/nope.png"], broken, [seen, {"no": "picture"}]]
    results = engine.generate(["a", "b", "c", "d"], images=batch, on_error="return", **SHORT)
    told = [result.error.message if result.error else "" for result in results]
    assert told[:2] == ["", "image 3 of prompt 2: /nope.png: no such file"]
    assert told[2].startswith(f"prompt 3: {broken}: the image ")
    assert told[3].startswith("image 2 of prompt 4: an image must be ")
    with pytest.raises(MediaFetchFailed, match=r"^image 3 of prompt 2: /nope\.png: no such file\n"):
        engine.generate(["a", "b"], images=batch[:2], **SHORT)
    with pytest.raises(MediaFetchFailed, match=r"^image 3: /nope\.png: no such file$"):
        engine.generate("b", images=batch[1], **SHORT)
    with pytest.raises(MediaFetchFailed, match=r"^/nope\.png: no such file$"):
        list(engine.stream("b", "/nope.png", **SHORT))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"temperature": 3.0}, InvalidRequest, "temperature"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ({"max_tokens": 10**6}, ContextLengthExceeded, "maximum context length is"),
        ({"nonsense": 1}, InvalidRequest, "nonsense"),
        ({"stop": ["x"] * 17}, InvalidRequest, "stop"),
        ({"on_error": "retrun"}, InvalidRequest, "on_error must be raise or return, not 'retrun'"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_wrong_parameters_get_a_sentence(engine: Engine, arguments: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        engine.generate("Hello", **arguments)


def test_a_closed_engine_says_so(make_engine: EngineFactory, tiny_model: Path) -> None:
    engine = make_engine()
    assert repr(engine) == f"<Engine {tiny_model}, cpu, EPD, running>"
    engine.close()
    engine.close()
    assert repr(engine).endswith(", EPD, closed>")
    for call in (engine.generate, engine.submit, engine.tokenize, engine.count_tokens):
        with pytest.raises(EngineClosed):
            call("Hello")


def test_what_the_engine_knows_prints_as_lines_for_a_reader(make_engine: EngineFactory) -> None:
    engine = make_engine()
    engine.generate("Hello", picture(1), **SHORT)
    summary, deadline = str(engine.summary), time.monotonic() + 60
    assert ", role EPD, cpu, float32, 1 thread per lane\nmemory: weights " in summary and "(2048 tokens)" in summary
    while "4 generated, 1 pictures encoded" not in (stats := str(engine.stats())):
        assert time.monotonic() < deadline, stats
        time.sleep(0.02)
    assert stats.startswith("0 running, 0 waiting, 0 encoding; KV cache ")


def test_closing_ends_running_requests(make_engine: EngineFactory) -> None:
    engine = make_engine()
    handle = engine.submit("Hello", temperature=0, max_tokens=400, ignore_eos=True)
    next(iter(handle))
    engine.close()
    with pytest.raises(EngineClosed):
        handle.result(30)


def test_results_can_be_pickled(engine: Engine) -> None:
    import pickle

    result = engine.generate("Hello", picture(1), logprobs=1, **SHORT)
    assert pickle.loads(pickle.dumps(result)) == result


def test_the_timeline_names_every_stage(make_engine: EngineFactory, tmp_path: Path) -> None:
    engine = make_engine()
    result = engine.generate("Hello", picture(1), **SHORT)
    stages = {span.stage for span in result.timeline}
    assert {"preprocess", "tokenize", "encode", "prefill", "decode"} <= stages
    assert all(0 <= s.start_s <= s.end_s for s in result.timeline)
    assert max(s.end_s for s in result.timeline) <= result.metrics.e2e_s + 0.05
    engine.export_trace(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert {"encode", "decode"} <= {e["name"] for e in events}


def test_unknown_options_and_missing_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_gb"):
        Engine("demo", kv_cache_gb=1)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Engine(tmp_path)


def test_sampling_params_and_keywords_exclude_each_other(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="not both"):
        engine.generate("Hello", sampling=SamplingParams(), temperature=0)
    with pytest.raises(InvalidRequest, match="mean the same"):
        engine.generate("Hello", SamplingParams(), sampling=SamplingParams(n=2))
    with pytest.raises(InvalidRequest, match="given twice"):
        engine.generate("Hello", SamplingParams(), sampling_params=SamplingParams(n=2))
    assert len(engine.generate("Hello", SamplingParams(**SHORT), sampling_params=None).token_ids) == 4


def test_what_decodes_pictures_starts_while_the_model_loads(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up, load = Decoders.warm_up, Supervisor.start
    started = threading.Event()

    def noted(decoders: Decoders, num_children: int) -> None:
        warm_up(decoders, num_children)
        started.set()

    async def load_late(supervisor: Supervisor, listener: ClusterListener) -> None:
        assert await asyncio.to_thread(started.wait, 20)
        await load(supervisor, listener)

    monkeypatch.setattr(Decoders, "warm_up", noted)
    monkeypatch.setattr(Supervisor, "start", load_late)
    engine = make_engine(decode_workers=2)
    assert len(engine.frontend.preprocessor._loader._decoders.pictures.pids()) == 2


def test_keywords_are_the_fields_of_sampling_params() -> None:
    """Typed twice, because a type checker reads no dataclass as keywords."""
    assert list(SamplingOptions.__annotations__) == [field.name for field in dataclasses.fields(SamplingParams)]


def test_an_interrupt_cancels_the_batch_and_keeps_what_had_ended(make_engine: EngineFactory) -> None:
    engine = make_engine(max_num_seqs=1)  # one after the other
    ended = threading.Semaphore(0)
    engine.add_observer(lambda result: ended.release())
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        for _ in range(2):  # by the second end the first has surely been noted
            ended.acquire(timeout=30)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        engine.generate(["Hello"] * 8, temperature=0, max_tokens=200, ignore_eos=True)
    thread.join()
    results = caught.value.results  # type: ignore[attr-defined]
    assert len(results) == 8 and None in results
    assert any(r is not None and len(r.token_ids) == 200 for r in results)
    assert_at_rest(engine)
    assert len(engine.generate("Hello", **SHORT).token_ids) == 4

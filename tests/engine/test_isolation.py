"""A request that goes wrong harms only itself: four healthy neighbours keep their tokens, the ledger balances."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hydra_engine import Engine
from hydra_engine.config.engine import DEFAULT_IMAGES
from hydra_engine.errors import HydraError, InvalidRequest, RequestError, RequestFailed
from tests import faults
from tests.calls import asked
from tests.engine.conftest import EngineFactory, assert_at_rest, picture
from tests.faults import set_fault

HEALTHY: list[tuple[str, Any]] = [("one text", None), ("another", None), ("see", picture(1)), ("look", picture(2))]
OPTIONS = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


POISON: dict[str, Callable[[Engine], Any]] = {
    "not a picture": lambda e: e.submit("x", b"\x89PNG\r\n\x1a\nnonsense"),
    "empty picture": lambda e: e.submit("x", b""),
    "truncated picture": lambda e: e.submit("x", png(picture(5))[:2000]),
    "bomb": lambda e: e.submit("x", png(Image.new("1", (13_300, 13_300)))),
    "absurd shape": lambda e: e.submit("x", Image.new("RGB", (4000, 1))),
    "wrong base64": lambda e: e.submit("x", "data:image/png;base64,@@@"),
    "too many pictures": lambda e: e.submit("x", [picture(0)] * (DEFAULT_IMAGES + 1)),
    "too long": lambda e: e.submit("word " * 5000),
    "placeholder in raw text": lambda e: e.submit("<image> <image>", raw=True),
    "wrong type": lambda e: e.submit([{"role": "user", "content": 5}]),
    "unknown role": lambda e: e.submit([{"role": "nobody", "content": "x"}]),
    "no messages": lambda e: e.submit([]),
    "local address": lambda e: e.submit("x", "http://127.0.0.1:9/x.png"),
    "array of the wrong shape": lambda e: e.submit("x", np.zeros((5, 5, 2), dtype=np.uint8)),
}


def golden(engine: Engine) -> list[tuple[int, ...]]:
    return [engine.generate(text, image, **OPTIONS).token_ids for text, image in HEALTHY]


def test_bad_input_leaves_neighbours_alone(make_engine: EngineFactory) -> None:
    engine = make_engine(prefix_caching=False)  # the neighbours are asked again and again, and computed each time
    expected = golden(engine)
    for name, poison in POISON.items():
        handles = [engine.submit(text, image, **OPTIONS) for text, image in HEALTHY]
        with pytest.raises(RequestError) as caught:
            poison(engine).result(60)
        assert caught.value.status in (400, 413), name
        message = caught.value.message
        assert "\n" not in message and "0x" not in message and "/root" not in message, (name, message)
        assert [h.result(60).token_ids for h in handles] == expected, name
        assert_at_rest(engine)


@pytest.mark.quick("vis.before_step")
@pytest.mark.parametrize(
    ("point", "action"),
    [
        ("eng.before_step", "raise"),
        ("eng.mid_step", "raise"),
        ("eng.mid_step", "nan"),
        ("vis.before_step", "raise"),
        ("vis.before_step", "nan"),
    ],
)
def test_a_fault_in_a_step_fails_one_request(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, point: str, action: str
) -> None:
    faults.enable(monkeypatch)
    engine = make_engine(prefix_caching=False)
    expected = golden(engine)
    handles = [engine.submit(text, image, **OPTIONS) for text, image in HEALTHY]
    number, victim = engine.frontend.open_handle()
    set_fault(engine.frontend, point, action, f"request={number}")
    engine._wait(engine.frontend.submit(number, victim, _call(engine)))
    with pytest.raises(RequestFailed) as caught:
        victim.result(60)
    assert caught.value.status == 500
    assert caught.value.code == ("numerical_error" if action == "nan" else "internal_error")
    assert [h.result(60).token_ids for h in handles] == expected
    assert_at_rest(engine)
    set_fault(engine.frontend, point, "off")
    assert golden(engine) == expected


def _call(engine: Engine) -> Any:
    return asked("a picture too", images=picture(9), **OPTIONS)


def test_what_can_never_fit_is_refused_at_the_door(make_engine: EngineFactory) -> None:
    engine = make_engine(num_kv_blocks=16, block_size=4, max_model_len=64)
    with pytest.raises(InvalidRequest, match="maximum context length"):
        engine.generate("word " * 40, **OPTIONS)
    assert len(engine.generate("hi", temperature=0, max_tokens=8, ignore_eos=True).token_ids) == 8


def test_a_full_queue_is_refused_with_a_time_to_come_back(make_engine: EngineFactory) -> None:
    engine = make_engine(max_queue=3)
    handles = [engine.submit("Hello", **OPTIONS) for _ in range(12)]
    outcomes: list[HydraError | None] = []
    for handle in handles:
        try:
            handle.result(60)
            outcomes.append(None)
        except HydraError as error:
            outcomes.append(error)
    refused = [e for e in outcomes if e is not None]
    assert refused and len(refused) < 12
    assert all(e.status == 503 and e.code == "overloaded" and e.retry_after_s for e in refused)

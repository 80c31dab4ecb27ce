"""Types of the public calls for type checkers and editors: `make check` reads this file, nothing runs it."""

from typing import assert_type

from PIL.Image import Image

from hydra_engine import Engine
from hydra_engine.core.outputs import Result


def blocking(engine: Engine, picture: Image) -> None:
    assert_type(engine.generate("a", picture, max_tokens=4), Result)
    assert_type(engine.generate([1, 2, 3], images=[picture, "b.png"], temperature=0, seed=None), Result)
    assert_type(engine.generate(["a", "b"], images=[None, [picture, "b.png"]], progress=True), list[Result])
    assert_type(engine.generate([[1, 2], "b"], videos=["a.mp4", [picture]], on_error="return"), list[Result])
    message = {"role": "user", "content": "a"}
    assert_type(engine.chat([message], images=picture, response_format={"type": "json_object"}), Result)
    assert_type(engine.chat([[message], [message]], n=2), list[Result])
    engine.generate("a", temprature=0)  # type: ignore[call-overload]
    engine.generate("a", temperature="0")  # type: ignore[call-overload]
    engine.submit("a", max_token=4)  # type: ignore[call-arg]


async def awaited(engine: Engine) -> None:
    assert_type(await engine.agenerate("a", stop="b", logit_bias={5: 1.0}), Result)
    assert_type(await engine.agenerate(["a"]), list[Result])
    assert_type(await engine.achat([{"role": "user", "content": "a"}]), Result)
    assert_type([piece.text async for piece in engine.astream("a", max_tokens=4)], list[str])

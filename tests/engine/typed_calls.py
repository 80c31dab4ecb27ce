"""Types of the public calls for type checkers and editors: `make check` reads this file, nothing runs it."""

from io import BytesIO
from pathlib import Path
from typing import assert_type

from PIL.Image import Image

from hydra_engine import Engine, Handle, Result, SamplingParams
from hydra_engine.config import SchedulerConfig


def blocking(engine: Engine, picture: Image) -> None:
    assert_type(engine.generate("a", picture, max_tokens=4), Result)
    assert_type(engine.generate([1, 2, 3], images=[picture, "b.png"], temperature=0, seed=None), Result)
    assert_type(engine.generate(["a", "b"], images=[None, [picture, "b.png"]], progress=True), list[Result])
    assert_type(engine.generate([[1, 2], "b"], videos=["a.mp4", [picture]], on_error="return"), list[Result])
    message = {"role": "user", "content": "a"}
    assert_type(engine.chat([message], images=picture, response_format={"type": "json_object"}), Result)
    assert_type(engine.chat([[message], [message]], n=2), list[Result])
    assert_type(engine.generate({"prompt": "a", "multi_modal_data": {"image": picture}}), Result)
    assert_type(engine.generate([{"prompt": "a"}, {"prompt_token_ids": [1]}]), list[Result])
    assert_type(engine.generate("a", SamplingParams()), Result)
    assert_type(engine.generate(["a", "b"], sampling_params=SamplingParams()), list[Result])
    with open("a.png", "rb") as file:
        engine.submit([message], images=[file, BytesIO(b"")]).cancel()
    assert_type(engine.tokenize([message], picture), list[int])
    assert_type(engine.count_tokens("a"), int)
    assert_type(engine.detokenize([1, 2]), str)
    engine.generate([message])  # type: ignore[list-item]
    engine.generate("a", temprature=0)  # type: ignore[call-overload]
    engine.generate("a", temperature="0")  # type: ignore[call-overload]
    engine.submit("a", max_token=4)  # type: ignore[call-arg]


def starting(folder: Path) -> None:
    Engine(folder, progress=False, max_model_len=4096, dtype="bfloat16", kv_cache_gib=1, chat_template=folder / "a")
    Engine("demo", tpot_slo="40ms", ttft_slo=1, scheduler=SchedulerConfig(max_num_seqs=8), cuda_graph_sizes=[1, 2])
    Engine("demo", max_num_batched_tokens=256, limit_mm_per_prompt={"image": 2}, enable_prefix_caching=False)
    Engine("demo", bogus=3)  # type: ignore[call-arg]
    Engine("demo", seed="x")  # type: ignore[arg-type]
    Engine("demo", seed=None)  # type: ignore[arg-type]
    Engine("demo", max_num_seqs=8.5)  # type: ignore[arg-type]


async def awaited(engine: Engine, picture: Image) -> None:
    assert_type(await engine.agenerate("a", stop="b", logit_bias={5: 1.0}), Result)
    assert_type(await engine.agenerate(["a"]), list[Result])
    assert_type(await engine.achat([{"role": "user", "content": "a"}]), Result)
    assert_type(await engine.asubmit("a", picture, request_id="b"), Handle)
    assert_type([piece.text async for piece in engine.astream("a", max_tokens=4)], list[str])

"""The table of options: in every place a wrong value is refused in one sentence, and a right text means the same."""

from __future__ import annotations

import argparse
import logging
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hydra_engine.cli.options import add_all_options
from hydra_engine.cli.sources import Settings, read_settings
from hydra_engine.config import (
    CacheConfig,
    EngineConfig,
    EngineOptions,
    MediaConfig,
    SchedulerConfig,
    ServerConfig,
    check_start,
    config_from_options,
)
from hydra_engine.config.engine import PARTS
from hydra_engine.config.fields import Option
from hydra_engine.config.options import SECTIONS, all_options, warning_of_units
from hydra_engine.config.values import value_from_object
from hydra_engine.engine import Engine
from hydra_engine.errors import CheckpointError, ConfigError

ENGINE = [option for option in all_options() if option.owner is not ServerConfig and not option.positional]
NO_VALUES: tuple[Any, ...] = (object(), [object()], {1: 2}, b"x", {"a", "b"}, lambda: 0, 10**5000, float("nan"))


@cache
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_all_options(made)
    return made


def settings(*flags: str) -> Settings:
    return read_settings(parser().parse_args(flags))


def value(config: EngineConfig, option: Option) -> Any:
    part = next((name for name, cls in PARTS.items() if cls is option.owner), None)
    return getattr(getattr(config, part) if part else config, option.field)


def wrong_values(option: Option) -> tuple[Any, ...]:
    """Values of other types, and texts that are no value of the option."""
    none = () if option.optional else (None,)
    numbers: tuple[Any, ...] = ("much", "", "1e", True, "9" * 50)
    if option.form == "json":
        return (*none, 3, True, object(), [1], {"a": object()}, 10**5000)
    of_kind: dict[type, tuple[Any, ...]] = {
        bool: (1, 0, 1.0, "perhaps", ""),
        int: (*numbers, 8.5, "8.5", np.float64(8.5)),
        float: numbers,
        str: (3, 2.5, True, *(("nothing",) if option.choices else ())),
        tuple: (3, True, [2.5], [[]], *(("a", ["a"]) if option.item is int else ([1],))),
    }
    return (*none, *NO_VALUES, *of_kind[option.kind])


@pytest.mark.parametrize("option", all_options(), ids=lambda option: option.name)
def test_a_wrong_value_is_one_sentence_in_every_place(option: Option, tmp_path: Path) -> None:
    for wrong in wrong_values(option):
        places = [lambda given=wrong: option.owner(**{option.field: given})]
        if option in ENGINE:
            places.append(lambda given=wrong: config_from_options("demo", {option.field: given}))
        for place in places:
            with pytest.raises(ConfigError) as caught:
                place()
            sentence = caught.value.message
            assert sentence.startswith(f"{option.field} ") and caught.value.param == option.field
            assert not any(part in sentence for part in ("\n", "  ", " at 0x")) and len(sentence) < 250


def example(option: Option) -> str:
    if option.choices:
        return next(choice for choice in option.choices if choice != option.default)
    texts: dict[str, str] = {
        **{"topology": "EP+D", "instance_limits": "EPD:max_num_seqs=2", "sm_split": "32,64"},
        **{"gpu_memory_utilization": "0.5", "trust_remote_code": "off", "max_pixels": "4k", "min_pixels": "1k"},
        **{"override_generation_config": '{"top_k": 4}', "max_fetched_bytes": "1G", "max_image_bytes": "1M"},
    }
    kinds = {
        bool: "off" if option.default else "on",
        int: "7",
        float: "12.5",
        str: "abc",
        tuple: "7,9" if option.item is int else "a.example",
    }
    return texts.get(option.field, "40ms" if option.form == "seconds" else kinds[option.kind])


@pytest.mark.parametrize("option", ENGINE, ids=lambda option: option.name)
def test_a_text_means_the_same_as_keyword_and_in_a_file(option: Option, tmp_path: Path) -> None:
    text = example(option)
    keyword = value(config_from_options("demo", {option.field: text}), option)
    assert keyword == getattr(option.owner(**{option.field: text}), option.field)
    assert keyword == value_from_object(option, keyword, option.field)  # it stays what it is
    file = tmp_path / "config.yaml"
    file.write_text(f"{option.name}: '{text}'\n")
    assert keyword == value(settings("--config", str(file)).engine(), option)
    if option.kind is not bool:
        assert keyword == value(settings(option.flag, text).engine(), option)
    for alias in option.aliases:
        assert keyword == value(config_from_options("demo", {alias.replace("-", "_"): text}), option)


def test_what_python_has_for_numbers_texts_and_lists() -> None:
    def given(**options: Any) -> EngineConfig:
        return config_from_options(options.pop("model", "demo"), options)

    assert type(given(max_num_seqs=np.int64(3)).scheduler.max_num_seqs) is int
    assert given(kv_cache_gib=np.float32(0.5)).cache.kv_cache_gib == 0.5
    assert given(prefix_caching=np.bool_(False)).cache.prefix_caching is False
    assert given(dtype=torch.bfloat16).dtype == given(dtype="bf16").dtype == "bfloat16"
    assert given(chat_template=Path("a"), model=Path("b")) == given(chat_template="a", model="b")
    assert given(allowed_media_domains=["a", "b"]) == given(allowed_media_domains="a,b")
    assert given(cuda_graph_sizes=[np.int32(2), 1]).cuda_graph_sizes == (1, 2)
    assert given(limit_mm_per_prompt={"image": 2}, max_images=2).media == MediaConfig(local_files=True, max_images=2)
    assert given(scheduler=SchedulerConfig(max_num_seqs=4), token_budget=9).scheduler.max_num_seqs == 4
    assert given(tpot_slo=None, max_model_len=None) == given(tensor_parallel_size=1) == given()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kv_cache_gb": 1}, "kv_cache_gb is not an option; the nearest one is kv_cache_gib"),
        ({"bogus": 1}, "bogus is not an option of Engine; `hydra-engine serve --help` lists all"),
        ({"local_files": True}, "local_files is not an option of Engine; `hydra-engine serve --help` lists all"),
        (
            {"tensor_parallel_size": 2},
            "tensor_parallel_size is not an option here: a model runs on one device here, which device= names; "
            "topology= puts its stages on several",
        ),
        ({"torch_dtype": "auto"}, "torch_dtype is not an option here: give dtype="),
        ({"load_in_4bit": True}, "load_in_4bit is not an option here: give quantization='int4'"),
        ({"disable_radix_cache": True}, "disable_radix_cache is not an option here: give prefix_caching=False"),
        ({"port": 1}, "port is an option of the server, `hydra-engine serve --port`"),
        ({"disable_log_stats": True}, "disable_log_stats is an option of the server, `hydra-engine serve --disable-"),
        ({"temperature": 0}, "temperature is set for each request: generate(.., temperature=..)"),
        ({"alias": "a"}, "alias is not an option here: give --served-model-name"),
        (
            {"token_budget": 1, "max_num_batched_tokens": 1},
            "max_num_batched_tokens and token_budget mean the same; give one of them",
        ),
        (
            {"max_images": 3, "limit_mm_per_prompt": {"image": 2}},
            "limit_mm_per_prompt and max_images contradict each other; give one",
        ),
        ({"limit_mm_per_prompt": 2}, "limit_mm_per_prompt must be counts such as"),
        ({"scheduler": {"max_num_seqs": 3}}, "scheduler must be a SchedulerConfig, not dict"),
        ({"max_num_batched_tokens": "x"}, "max_num_batched_tokens must be a whole number, not 'x'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype cannot be fp8 here: take int8"),
        ({"kv_cache_gib": -1}, "kv_cache_gib must be positive"),
        ({"pixel_cache_mib": -1}, "pixel_cache_mib must be 0 or more"),
        ({"x" * 500: 1}, "x" * 60 + " is not an option"),
    ],
    ids=lambda given: next(iter(given))[:30] if isinstance(given, dict) else "",
)
def test_a_keyword_that_is_none_gets_the_nearest_right_thing(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_options("demo", options)
    assert caught.value.message.startswith(sentence) and "--device" not in caught.value.message


def test_the_model_and_what_is_no_option_are_checked_too() -> None:
    for model in (5, None, b"demo", ["demo"]):
        with pytest.raises(ConfigError, match=r"^model must be text"):
            Engine(model)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^progress must be true or false, not 1"):
        Engine("demo", progress=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^processes must be true or false, not None"):
        Engine("demo", processes=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^config must be an EngineConfig, not dict"):
        Engine.from_config({})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^cache must be a CacheConfig, not SchedulerConfig"):
        EngineConfig(cache=SchedulerConfig())  # type: ignore[arg-type]
    assert check_start("off", True) == (False, True)


def test_a_switch_for_what_is_so_anyway_is_taken_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    assert config_from_options("demo", {"enable_chunked_prefill": True}) == config_from_options("demo", {})
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "enable_chunked_prefill changes nothing here"
    ]
    with pytest.raises(ConfigError, match="prefill is always chunked, by token_budget="):
        config_from_options("demo", {"enable_chunked_prefill": False})


def test_typed_keywords_are_the_table() -> None:
    """A type checker reads no table."""
    plain: dict[type, Any] = {bool: bool, int: int, float: float, str: str}
    forms: dict[str, Any] = {
        **{"seconds": float | str, "json": str | Mapping[str, Any]},
        **dict.fromkeys(("file", "folder"), str | PathLike[str]),
    }
    expected: dict[str, Any] = dict(PARTS)
    for option in ENGINE:
        kind = Sequence[option.item] if option.kind is tuple else forms.get(option.form, plain.get(option.kind))  # type: ignore[name-defined]
        for name in (option.field, *option.aliases):
            expected[name.replace("-", "_")] = kind | None if option.optional else kind
    expected["limit_mm_per_prompt"] = Mapping[str, int]
    assert typing.get_type_hints(EngineOptions) == expected
    sections = [field for cls in SECTIONS.values() for field in (f.name for f in fields(cls))]
    order = [name for name in EngineOptions.__annotations__ if name in sections and name not in PARTS]
    assert order == [option.field for option in ENGINE]


def test_seconds_between_tokens_are_noted_once(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = EngineConfig(model=str(tmp_path), scheduler=SchedulerConfig(tpot_slo=41))
    sentence = "tpot_slo is 41 s between two tokens; for 41 milliseconds write 41ms"
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with pytest.raises(CheckpointError):  # there is no model
                Engine.from_config(config)
    assert [record.message for record in caplog.records] == [sentence]
    for _ in range(2):
        assert settings("--tpot-slo", "42").engine().scheduler.tpot_slo == 42
    assert capsys.readouterr().err == f"hydra-engine: warning: {sentence.replace('41', '42')}\n"
    for limit in ("40ms", 1.0, None):
        assert warning_of_units(EngineConfig(scheduler=SchedulerConfig(tpot_slo=limit), cache=CacheConfig())) is None

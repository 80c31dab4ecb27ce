"""Keywords of a request: the table of parameters checks their names and types, and says what comes near."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

import pytest

from hydra_engine.cli.options import add_sampling_options, sampling_from
from hydra_engine.config.options import options_by_name
from hydra_engine.config.other_engines import REQUEST_INSTEAD
from hydra_engine.core.sampling import PARAMETERS, Parameter, SamplingParams
from hydra_engine.errors import InvalidRequest
from hydra_engine.frontend.call import BatchOptions, make_call

DEFAULTS = SamplingParams()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("temprature", "unknown parameter 'temprature'; did you mean temperature?"),
        ("Max_Tokens", "unknown parameter 'Max_Tokens'; did you mean max_tokens?"),
        ("max_new_tokens", "unknown parameter 'max_new_tokens': give max_tokens"),
        ("do_sample", "unknown parameter 'do_sample': temperature=0 always takes the most likely token, and any other"),
        ("params", "unknown parameter 'params': give sampling"),
        ("num_beams", "unknown parameter 'num_beams': there is no beam search; n gives several sampled answers"),
        ("use_tqdm", "unknown parameter 'use_tqdm': give progress"),
        ("image", "unknown parameter 'image': give images"),
        ("structured_outputs", "unknown parameter 'structured_outputs': give response_format, or grammar"),
        ("max_model_len", "unknown parameter 'max_model_len': it is an option of the engine, Engine(.., max_model_len"),
        ("zebra", "unknown parameter 'zebra'"),
    ],
)
def test_an_unknown_keyword_gets_the_nearest_name(name: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_call({name: 1}, DEFAULTS)
    assert caught.value.message.startswith(sentence) and caught.value.param == name
    assert name != "zebra" or caught.value.message == sentence


def test_words_of_other_engines_are_no_names_here() -> None:
    names = [name for several in REQUEST_INSTEAD.values() for name in several]
    assert len(names) == len(set(names)) and not set(names) & {*BatchOptions.__annotations__, "images", "videos"}


def wrong_values(parameter: Parameter) -> tuple[Any, ...]:
    none = () if parameter.optional or parameter.kind is tuple else (None,)
    if parameter.kind in (int, float):
        high = () if parameter.high is None else (parameter.high + 1,)
        return (*none, "1", True, [1], object(), *high, *((1.5,) if parameter.kind is int else ()))
    kinds = {bool: (1, "no", object()), tuple: (5, object(), [[1]], {1.5}, b"a")}
    return (*none, *kinds.get(parameter.kind, ("a", 5, {})))


@pytest.mark.parametrize("parameter", PARAMETERS.values(), ids=lambda parameter: parameter.name)
def test_a_wrong_value_names_its_parameter(parameter: Parameter) -> None:
    for wrong in wrong_values(parameter):
        with pytest.raises(InvalidRequest) as caught:
            make_call({parameter.name: wrong}, DEFAULTS)
        param = (caught.value.param or "").removesuffix(" token ids")
        assert param == parameter.name and "\n" not in caught.value.message
    assert make_call({parameter.name: parameter.default}, DEFAULTS).sampling == DEFAULTS


def test_flags_are_parameters_of_the_table() -> None:
    assert list(PARAMETERS) == [f.name for f in fields(SamplingParams)]
    parser = argparse.ArgumentParser()
    add_sampling_options(parser)
    flags = {action.dest for action in parser._actions} - {"help"}
    assert flags == {parameter.name for parameter in PARAMETERS.values() if parameter.flag}
    given = parser.parse_args(["--min-tokens", "3", "--ignore-eos", "--stop", "a", "--stop", "b", "--top-p", "0.5"])
    assert sampling_from(given) == {"min_tokens": 3, "ignore_eos": True, "stop": ("a", "b"), "top_p": 0.5}
    assert sampling_from(parser.parse_args([])) == {"stop": ()}
    assert "seed" in options_by_name()  # which generate takes for the request's

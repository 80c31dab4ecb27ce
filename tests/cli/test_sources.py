"""Flags, variables and the file: the same names, which of them wins, and what is said about wrong ones."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from hydra_engine.__main__ import main
from hydra_engine.cli import options
from hydra_engine.cli.commands import build_parser
from hydra_engine.cli.config import config_lines
from hydra_engine.cli.parser import Parser
from hydra_engine.cli.sources import Settings, read_settings
from hydra_engine.config import ServerConfig
from hydra_engine.config.fields import Option
from hydra_engine.config.options import MEDIA_LIMITS, SECTIONS, all_options, options_by_name, variable_of
from hydra_engine.config.values import value_from_object
from hydra_engine.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HYDRA_")]:
        monkeypatch.delenv(name)


def chosen(*arguments: str) -> Settings:
    return read_settings(parser().parse_args(["serve", *arguments]))


@cache
def parser() -> Parser:
    return build_parser(only="serve")[0]


def of_file(text: str, tmp_path: Path, *arguments: str) -> Settings:
    file = tmp_path / "serve.yaml"
    file.write_text(text, encoding="utf-8")
    return chosen("--config", str(file), *arguments)


def example(option: Option) -> tuple[str, Any]:
    """A value that is not the default, as text, and what it means."""
    if option.choices:
        other = next(choice for choice in option.choices if choice != option.default)
        return other, other
    texts: dict[Any, tuple[str, Any]] = {
        bool: ("off" if option.default else "on", not option.default),
        int: ("77", 77),
        float: ("12.5", 12.5),
        tuple: ("77", (77,)) if option.item is int else ("abc", ("abc",)),
        str: ("EP+D" if option.field == "topology" else "abc", "EP+D" if option.field == "topology" else "abc"),
    }
    return texts[option.kind]


@pytest.mark.parametrize("option", all_options(), ids=lambda option: option.name)
def test_every_option_has_one_name_in_all_three(
    option: Option, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, value = example(option)
    for name in (option.name, *option.aliases):
        if option.positional:
            by_flag = chosen(text)
        elif option.kind is bool:
            by_flag = chosen(f"--{name}" if value else f"--no-{name}")
        else:
            by_flag = chosen(f"--{name}", text)
        written = yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True)
        by_file = of_file(f"{name}: {written}", tmp_path)
        monkeypatch.setenv(variable_of(name), text)
        by_variable = chosen()
        monkeypatch.delenv(variable_of(name))
        for settings in (by_flag, by_variable, by_file):
            assert set(settings.chosen) == {option.field}
            assert settings.chosen[option.field].value == value
            assert type(settings.chosen[option.field].value) is type(value)


def test_names_are_unique_and_groups_name_real_options() -> None:
    names = [name for option in all_options() for name in (option.name, *option.aliases)]
    assert len(names) == len(set(names)) and MEDIA_LIMITS not in names
    by_field = [option.field for option in all_options()]
    assert len(by_field) == len(set(by_field))
    grouped = [field for group in options._GROUPS.values() for field in group]
    assert len(grouped) == len(set(grouped)) and set(grouped) <= set(by_field)


def test_flags_win_over_variables_and_these_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "max_num_seqs: 1\nmax-queue: 1\nport: 1\nsteal-decodes: no\nprefix-caching: false\nmodel: from-file\n"
    monkeypatch.setenv("HYDRA_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("HYDRA_PORT", "2")
    monkeypatch.setenv("HYDRA_ENABLE_PREFIX_CACHING", "Yes")
    settings = of_file(text, tmp_path, "--port", "3")
    engine = settings.engine()
    assert (engine.scheduler.max_queue, engine.scheduler.max_num_seqs, settings.server().port) == (1, 2, 3)
    assert (engine.cluster.steal_decodes, engine.cache.prefix_caching, engine.model) == (False, True, "from-file")
    assert [settings.chosen[name].source for name in ("max_queue", "max_num_seqs", "port")] == [
        *("serve.yaml, line 2", "HYDRA_MAX_NUM_SEQS", "--port")
    ]
    monkeypatch.setenv("HYDRA_MODEL", "from-environment")
    assert of_file(text, tmp_path).engine().model == "from-environment"
    assert of_file(text, tmp_path, "typed").engine().model == "typed"


def test_hydra_config_names_the_file_and_config_wins_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("port: 1\n")
    monkeypatch.setenv("HYDRA_CONFIG", str(other))
    assert chosen().server().port == 1
    assert of_file("port: 2\n", tmp_path).server().port == 2


def test_sections_group_and_must_be_the_right_ones(tmp_path: Path) -> None:
    settings = of_file("scheduler:\n  max-num-seqs: 8\nmedia:\nserver: {port: 9}\nseed: 4\n", tmp_path)
    assert (settings.engine().scheduler.max_num_seqs, settings.server().port, settings.engine().seed) == (8, 9, 4)
    with pytest.raises(ConfigError, match=r"max-num-seqs \(line 2 .*belongs to the section scheduler, not to cache"):
        of_file("cache:\n  max-num-seqs: 8\n", tmp_path)


def test_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen("--allow-origins", "a,b", "--allowed-origins", "c").server().allow_origins == ("a,b", "c")
    assert chosen("--allowed-origins", '["*"]').server().allow_origins == ("*",)
    assert of_file("allow-origins: [a, b]\n", tmp_path).server().allow_origins == ("a", "b")
    assert of_file("allow-origins: a\n", tmp_path).server().allow_origins == ("a",)
    monkeypatch.setenv("HYDRA_ALLOW_ORIGINS", "a, b,")
    assert chosen().server().allow_origins == ("a", "b")


def test_a_json_option_may_be_written_out_in_the_file(tmp_path: Path) -> None:
    written = of_file("override-generation-config: {temperature: 0.5, top_k: 4}\n", tmp_path).engine()
    as_text = chosen("--override-generation-config", '{"temperature": 0.5, "top_k": 4}').engine()
    assert written == as_text


def test_keys_of_the_environment_are_accepted_beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_API_KEY", "one,two")
    assert chosen().server().api_key == ("one", "two")
    assert chosen("--api-key", "three").server().api_key == ("three", "one", "two")
    assert of_file("api-key: [four]\n", tmp_path).server().api_key == ("four", "one", "two")


def test_media_limits_as_vllm_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = '{"image": 4, "video": 0, "audio": 0}'
    assert chosen("--limit-mm-per-prompt", limits).engine().media.max_images == 4
    assert of_file("limit-mm-per-prompt: {image: 3}\n", tmp_path).engine().media.max_images == 3
    monkeypatch.setenv("HYDRA_LIMIT_MM_PER_PROMPT", limits)
    media = chosen("--max-images", "9").engine().media
    assert (media.max_images, media.max_videos) == (9, 0)
    for wrong, words in (
        ("4", "must be counts"),
        ('{"image": true}', "must be counts"),
        ('{"image": -1}', "must be counts"),
        ("{" * 5000, "must be counts"),
        ('{"audio": 1}', "'audio' is not served here"),
    ):
        with pytest.raises(ConfigError, match=words):
            chosen("--limit-mm-per-prompt", wrong)
    with pytest.raises(ConfigError, match="contradict each other"):
        chosen("--limit-mm-per-prompt", limits, "--max-images", "9")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-num-seqs: many\n", "max-num-seqs (line 1 of the configuration file) must be a whole number, not 'many'"),
        ("\n\nmax-num-seqs: 1.5\n", "max-num-seqs (line 3 of the configuration file) must be a whole number, not 1.5"),
        ("max-num-seqs: [1]\n", "must be a whole number, not a list"),
        ("max-num-seqs: true\n", "must be a whole number, not True"),
        ("max-num-seqs: {a: 1}\n", "must be a whole number, not a mapping"),
        (f"max-num-seqs: {10**30}\n", "must be a smaller number"),
        ("kv-cache-gib: .nan\n", "must be a number, not nan"),
        ("kv-cache-gib: lots\n", "must be a number, not 'lots'"),
        ("steal-decodes: 1\n", "must be true or false, not 1"),
        ("steal-decodes: maybe\n", "must be on or off (1, 0, true, false, yes, no), not 'maybe'"),
        ("override-generation-config: [1]\n", "must be text, not a list"),
        ("host: 127\n", "must be text; put it in quotes, not 127"),
        ("host: 2001-01-01\n", "must be text, not a date"),
        ("host: 2001-99-01\n", "host (line 1 of the configuration file) is no plain value"),
        ("host: !!python/name:os.system x\n", "is no plain value"),
        ("api-key: [1, 2]\n", "must be a list of texts; put numbers in quotes"),
        ("dtype: float8\n", "must be auto, float32, bfloat16 or float16, not 'float8'"),
        ("max-num-seqs: 0\n", "max_num_seqs must be positive (set by serve.yaml, line 1)"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "max_num_seqs (line 2 of the configuration file) is given twice"),
        ("local-files: true\n", "'local-files' is not an option"),
        ("tensor-parallel-size: 2\n", "'tensor-parallel-size' is not an option here: a model runs on one device"),
        ("[1, 2]: 3\n", "line 1 of the configuration file: a key must be the name of an option"),
        ("port: 8000\n host: x\n", "is not valid YAML: line 2, column 6: mapping values are not allowed here"),
        ("port: [\n", "is not valid YAML: line 2"),
        ("port: \x01\n", "is not valid YAML: it contains characters that YAML does not allow"),
        ("token-budget = 7\n", "must hold lines such as `max-num-seqs: 8`"),
        ("port: 1\n---\nport: 2\n", "is not valid YAML"),
        ("scheduler: 3\n", "the section scheduler"),
        ("port: " + "[" * 100_000, "nested too deeply"),
        ("# " + "x" * (1 << 20), "larger than 1 MiB"),
    ],
)
def test_a_wrong_file_is_one_sentence(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        of_file(text, tmp_path).engine()
    assert words in caught.value.message and "\n" not in caught.value.message
    assert len(caught.value.message) < 200 and str(tmp_path) not in caught.value.message


def test_numbers_may_end_as_in_vllm(tmp_path: Path) -> None:
    for text, value in (("4k", 4000), ("4K", 4096), ("1m", 10**6), ("1M", 1 << 20), ("2G", 2 << 30)):
        assert chosen("--max-model-len", text).engine().max_model_len == value
        assert of_file(f"max-model-len: {text}\n", tmp_path).engine().max_model_len == value
    for wrong in ("k", "-4k", "4kb", "4 k", "1.5K"):
        with pytest.raises(ConfigError, match="must be a whole number"):
            chosen(f"--max-model-len={wrong}")
    with pytest.raises(ConfigError, match="must be a smaller number"):
        chosen("--max-model-len", "999999999999999999G")


def test_weights_from_a_seed_have_vllm_s_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen("--load-format", "dummy").engine().load_format == "random"
    monkeypatch.setenv("HYDRA_LOAD_FORMAT", "dummy")
    assert chosen().engine().load_format == "random"


@pytest.mark.parametrize("path", [".", "no-such-file"])
def test_a_file_that_cannot_be_read(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file \S+: "):
        chosen("--config", str(tmp_path / path))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("HYDRA_MAX_NUM_SEQS", "many", "HYDRA_MAX_NUM_SEQS must be a whole number, not 'many'"),
        ("HYDRA_STEAL_DECODES", "perhaps", "HYDRA_STEAL_DECODES must be on or off"),
        ("HYDRA_TPOT_SLO", "soon", "HYDRA_TPOT_SLO must be a time"),
        ("HYDRA_DTYPE", "int4", "HYDRA_DTYPE must be auto, float32, bfloat16 or float16, not 'int4'"),
        ("HYDRA_KV_CACHE_DTYPE", "fp8_e4m3", "HYDRA_KV_CACHE_DTYPE cannot be fp8_e4m3 here: take int8"),
        ("HYDRA_PORT", "tcp://10.0.0.1:8000", "Kubernetes sets it for a Service named hydra"),
        ("HYDRA_PORT", "99999", "port must be between 0, which takes a free one, and 65535 (set by HYDRA_PORT)"),
        ("HYDRA_PORT", "-1", "port must be between 0"),
        ("HYDRA_THREADS", "0", "threads must be between 1 and 1024 (set by HYDRA_THREADS)"),
        ("HYDRA_ALLOW_ORIGINS", "[1", "HYDRA_ALLOW_ORIGINS begins like a JSON list but is not one"),
    ],
)
def test_a_wrong_variable_is_one_sentence(name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        chosen().engine()
        chosen().server()
    assert words in caught.value.message


def test_two_names_of_one_option_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_TOKEN_BUDGET", "1")
    monkeypatch.setenv("HYDRA_MAX_NUM_BATCHED_TOKENS", "2")
    with pytest.raises(ConfigError, match="mean the same; set one of them"):
        chosen()


def test_variables_that_are_no_options_are_named_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HYDRA_MAX_NUM_SEQ", "HYDRA_CUDA_SYNC", "HYDRA_CPU_ONLY", "HYDRA_PORTT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HYDRA_HOST", "")  # as good as not there
    assert chosen().server().host == ServerConfig().host
    assert capsys.readouterr().err == (
        "hydra-engine: warning: HYDRA_MAX_NUM_SEQ is not an option; the nearest one is HYDRA_MAX_NUM_SEQS; "
        "the variable is ignored\n"
        "hydra-engine: warning: HYDRA_PORTT is not an option; the nearest one is HYDRA_PORT; the variable is ignored\n"
    )


# ---- hydra-engine config


def test_what_config_prints_is_a_file_with_sources_and_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYDRA_API_KEY", "sesame,open")
    monkeypatch.setenv("HYDRA_ADMIN_KEY", "open-admin")
    monkeypatch.setenv("HYDRA_ALLOW_ORIGINS", "https://a.example,https://b.example")
    arguments = ["--max-num-seqs", "8", "--tpot-slo", "40ms", "--chat-template", "a: b #c.jinja", "--no-steal-decodes"]
    assert main(["config", "some/model", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "sesame" not in printed and "open" not in printed
    assert "# api-key: 2 not shown" in printed and "# admin-key: 1 not shown" in printed
    sources = {line.split(":")[0].strip(): line.rsplit("# ", 1)[1] for line in printed.splitlines() if "# " in line}
    assert sources["max-num-seqs"] == "--max-num-seqs" and sources["allow-origins"] == "HYDRA_ALLOW_ORIGINS"
    assert sources["port"] == "default" and sources["model"] == "the command line"
    assert {line.split(":")[0] for line in printed.splitlines() if not line.startswith(" ")} == set(SECTIONS)

    before = chosen("some/model", *arguments)
    assert of_file(printed, tmp_path).engine() == before.engine()
    assert of_file(printed, tmp_path).server() == before.server()
    changed = config_lines(before, changed_only=True)
    assert len(changed) < 16 and of_file("\n".join(changed), tmp_path).engine() == before.engine()


def test_what_is_found_at_the_start_has_a_comment(tmp_path: Path) -> None:
    def comments(*arguments: str) -> dict[str, str]:
        lines = [line.partition("  # ") for line in config_lines(chosen(*arguments))]
        assert of_file("\n".join(map("".join, lines)), tmp_path).engine() == chosen(*arguments).engine()
        return {name.split(":")[0].strip(): comment for name, _, comment in lines if ": null" in name or ": []" in name}

    anywhere = comments()
    for option in all_options():
        if option.unset:
            assert anywhere[option.name] == f"default: {option.unset}"
    assert anywhere["max-model-len"] == "default: what the model allows"
    on_cpu = comments("--device", "cpu")
    assert (on_cpu["max-num-seqs"], on_cpu["token-budget"]) == ("default: 64", "default: 512")
    assert on_cpu["kv-cache-gib"] == anywhere["kv-cache-gib"]


def test_all_defaults_are_no_lines() -> None:
    assert config_lines(chosen(), changed_only=True) == ["{}  # all defaults"]


def test_secrets_are_known_as_such() -> None:
    assert {option.name for option in all_options() if option.secret} >= {"api-key", "admin-key"}
    with pytest.raises(ConfigError) as caught:
        value_from_object(options_by_name()["admin-key"], ["sesame"], "admin-key")
    assert "sesame" not in caught.value.message


# ---- the command line itself


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--max-num", "3"], "--max-num is not an option; the nearest one is --max-num-seqs"),
        (["serve", "--tensor-parallel-size=2"], "--tensor-parallel-size is not an option here: a model runs on one"),
        (["serve", "--kv-cache-memory-bytes", "9"], "give the cache a size with --kv-cache-gib"),
        (["serve", "a", "b"], "'b' is one argument too many"),
        (["srve"], "did you mean serve?"),
    ],
)
def test_a_wrong_flag_is_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and words in error and len(error.splitlines()) == 2


def test_flags_may_be_written_with_underscores() -> None:
    settings = chosen("--max_num_seqs", "3", "--chat_template=a_b", "--no-prefix_caching")
    assert settings.engine().chat_template == "a_b" and not settings.engine().cache.prefix_caching


@pytest.mark.parametrize("asked", [["--help=max-num"], ["--help", "max_num"], ["--help", "MAX-NUM"]])
def test_help_finds_flags_by_a_part_of_their_name(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *asked])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert "--max-num-seqs" in text and "--token-budget" in text  # once --max-num-batched-tokens
    assert "--port" not in text and text.splitlines()[0] == "latency and batching:"


def test_help_says_what_comes_near(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help=max-model-length"])
    assert ended.value.code == 2 and "near are --max-model-len" in capsys.readouterr().out


def test_help_shows_every_option_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    for option in all_options():
        if not option.positional:
            assert sum(line.startswith(f"  {option.flag}{end}") for line in text.splitlines() for end in " ,\n") == 1

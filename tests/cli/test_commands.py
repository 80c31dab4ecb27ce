"""Commands as a person types them: in a process once, and in this one for what differs."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hydra_engine.__main__ import main
from hydra_engine.backend.devices import probe
from hydra_engine.cli import serve
from hydra_engine.cli.commands import build_parser
from hydra_engine.config import EngineConfig, ServerConfig, other_engines
from hydra_engine.frontend.frontend import Frontend
from tests.cli.conftest import Here
from tests.models.specs.test_model_files import text as gguf_text
from tests.packaging.flags import FLAG

ROOT = Path(__file__).parents[2]
PICTURE = "hydra_engine/demo/pictures/stars.png"


def hydra(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hydra_engine", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, input=stdin)


def test_demo_prints_pictures_questions_answers_and_timelines() -> None:
    done = hydra("demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("picture   hydra_engine/demo/pictures/") == 3
    assert done.stdout.count("question  ") == 4 and done.stdout.count("answer    ") == 4
    assert "4 of 4 answers are right." in done.stdout
    for stage in ("tokenize", "preprocess", "encode", "prefill", "decode"):
        assert f"  {stage} " in done.stdout


def test_generate_streams_an_answer() -> None:
    done = hydra("generate", "--image", PICTURE, "--timeline", stdin="Describe the picture.\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("There is") and "prefill" in done.stdout


@pytest.mark.slow
def test_generate_takes_a_picture_from_a_pipe_and_a_schema_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "sum.json").write_text(
        '{"type": "object", "properties": {"n": {"enum": [3, 5]}}, "required": ["n"], "additionalProperties": false}'
    )
    command = [sys.executable, "-m", "hydra_engine", "generate", "How many objects are there?", "--image", "-"]
    command += ["--system", "Answer in JSON.", "--json-schema", str(tmp_path / "sum.json"), "--temperature", "0"]
    with open(ROOT / PICTURE, "rb") as picture:
        done = subprocess.run(command, stdin=picture, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert json.loads(done.stdout)["n"] in (3, 5), done.stderr


@pytest.mark.parametrize(
    ("arguments", "piped", "said"),
    [
        (("-", "--image", "-"), b"x", "standard input is one thing only: the question, or one picture (--image -)"),
        ((), b" \n", "the question on standard input is empty"),
        (("-",), b"\xff", "the question on standard input is not UTF-8 text"),
        (
            ("x", "--image", "-"),
            b"no picture",
            "the image has an unsupported format; supported: PNG, JPEG, WEBP, GIF, BMP",
        ),
        (("x", "--video", "README.md"), b"", "README.md: the video has an unsupported format; supported: MP4, MOV,"),
        (("x", "--json-schema", "{type: 1}"), b"", "--json-schema is not valid JSON: line 1, column 2: Expecting"),
        (("x", "--json-schema", '{"type": "text"}'), b"", "--json-schema cannot be followed: Invalid type: text"),
        (("x", "--json-schema", "/no/file"), b"", "--json-schema: cannot read /no/file: no such file or directory"),
        (("x", "--temperature", "9"), b"", "temperature must be a number between 0.0 and 2.0"),
    ],
)
def test_generate_refuses_its_input_before_it_looks_for_the_model(
    arguments: tuple[str, ...], piped: bytes, said: str, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(piped)))
    done = here("generate", *arguments, "--model", "/no/model")
    assert done.returncode == 2 and done.stderr.startswith(f"hydra-engine: {said}") and done.stderr.count("\n") == 1


def test_bad_pictures_and_a_missing_template_are_named_before_anything_is_loaded(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer_config.json").write_text("{}")
    fake, large = str(tmp_path / "fake.png"), str(tmp_path / "large.png")
    Path(fake).write_text("no picture at all")
    Path(large).write_bytes(bytes(4096))
    given = [["/nope.png"], [PICTURE, "/nope.png"], [fake], [large], [str(tmp_path)]]
    code = (
        f"import sys\nfrom hydra_engine.__main__ import main\nfor pictures in {given!r}:\n"
        "    flags = [word for picture in pictures for word in ('--image', picture)]\n"
        "    print(main(['generate', 'x', '--model', '/no/model', '--max-image-bytes', '3072', *flags]))\n"
        f"for more in ([], ['--chat-template', '/no/such.jinja']):\n"
        f"    print(main(['generate', 'x', '--model', {str(bare)!r}, *more]))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.split() == ["2"] * 7 + ["False"], done.stderr
    assert done.stderr.replace("hydra-engine: ", "").splitlines() == [
        "/nope.png: no such file",
        "image 2: /nope.png: no such file",
        f"{fake}: the image has an unsupported format; supported: PNG, JPEG, WEBP, GIF, BMP",
        f"{large}: the image is larger than 3 KiB",
        f"{tmp_path}: is a directory",
        "the model has no chat template; give one with --chat-template FILE",
        "cannot read the chat template /no/such.jinja: No such file or directory",
    ]


def test_gguf_files_are_for_what_they_hold(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = str(gguf_text(tmp_path / "model.gguf"))
    seen = here("generate", "x", "--model", model, "--image", PICTURE)
    assert (seen.returncode, seen.stderr) == (
        2,
        "hydra-engine: this GGUF file is a text model; for pictures give its vision tower with --mmproj\n",
    )
    written = here("quantize", model, str(tmp_path / "out"), "--quantization", "int4")
    assert written.returncode == 3 and "is served as it is; give the folder or hub id" in written.stderr


def test_generate_says_what_is_wrong(here: Here) -> None:
    for arguments, code, words in (
        (("x", "--model", "no-such-folder"), 3, "no model directory"),
        (("x", "--kv-cache-gib", "0.000001"), 4, "KV cache"),
        (("x", "--kv-cache-gib", "1e6"), 4, "for instance role EPD; lower --kv-cache-gib"),
        (("x", "--num-kv-blocks", "1000000000000"), 4, "for instance role EPD; lower --num-kv-blocks"),
        (
            ("x", "--image-cache-gib", "1e6", "--topology", "EP+D"),
            4,
            "ep0: caches 100000",
        ),  # and what other caches take
        (("x", "--config", "no-such-file.yaml"), 2, "configuration file"),
        (("x", "--tpot-slo", "soon"), 2, "--tpot-slo"),
        (("x", "--chat-template", "/no/template"), 2, "cannot read the chat template /no/template: No such file"),
    ):
        done = here("generate", *arguments, "--threads", "1")
        assert done.returncode == code, (arguments, done.stderr)
        assert done.stderr.strip().splitlines()[-1].startswith("hydra-engine: ") and words in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command", [("serve", "demo", "--port", "0"), ("run-batch", "-i", "-", "-o", "-")], ids=" ".join
)
def test_a_chat_template_is_read_before_the_weights(
    command: tuple[str, ...], here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Frontend, "start", None)
    done = here(*command, "--chat-template", "/no/template")
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        ["hydra-engine: cannot read the chat template /no/template: No such file or directory"],
    )


def test_a_profile_that_could_not_be_written_is_refused_before_it_is_measured(here: Here) -> None:
    done = here("profile", "demo", "--output", "/no/such/file")
    assert done.returncode == 2 and "--output /no/such/file: there is no folder /no/such" in done.stderr


def test_a_configuration_file_is_read_and_flags_win(tmp_path: Path, here: Here) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("token-budget: 7\nmax_num_seqs: 3\nlog-level: error\n")
    done = here("demo", "--config", str(file), "--max-num-seqs", "5", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert "7 tokens a language step" in done.stdout
    file.write_text("\nmax-num-sequences: 1\n")
    refused = here("demo", "--config", str(file))
    assert refused.returncode == 2
    assert "line 2 of the configuration file: 'max-num-sequences' is not an option" in refused.stderr
    assert "the nearest one is max-num-seqs" in refused.stderr


def test_doctor_lists_every_operation_with_a_reason(here: Here) -> None:
    done, again = hydra("doctor"), here("env")
    assert done.returncode == again.returncode == 0, done.stderr
    assert again.stdout.splitlines()[0] == done.stdout.splitlines()[0]
    table = done.stdout.split("operations\n")[1].strip().splitlines()
    assert len(table) >= 12 and all(len(line.split(maxsplit=2)) == 3 for line in table)
    assert re.search(
        r"\n  memory +[\d.]+ GiB, [\d.]+ [GM]iB available\n  for downloads +[\d.]+ [GMT]iB free in", done.stdout
    )


def test_doctor_tells_what_it_found_of_cuda_and_what_it_would_take(here: Here) -> None:
    found = probe()
    lines = [line.strip() for line in here("doctor").stdout.splitlines()]
    section = lines[lines.index("cuda") + 1 : lines.index("device")]
    assert any(line.startswith("extension") and " ".join(found.codes) in line for line in section)
    assert [line.split()[0] for line in section if line.startswith("cuda:")] == [
        f"cuda:{d.index}" for d in found.devices
    ]
    if found.problem:
        assert f"problem{' ' * 14}{found.problem}" in section
        assert lines[lines.index("device") + 1] == f"taken{' ' * 16}cpu: {found.problem}"


def test_doctor_says_why_a_device_cannot_be_had(here: Here) -> None:
    done = here("doctor", "--device", "cuda:63")
    assert done.returncode == 0 and "device cuda:63 cannot be used: " in done.stdout.split("operations\n")[1]


def test_bench_lists_its_benchmarks_and_refuses_others(here: Here) -> None:
    done = here("bench")
    assert done.returncode == 0 and "serve" in done.stdout and "ops.linear" in done.stdout
    assert here("bench", "nonsense").returncode == 2
    assert "did you mean serve or siege? `hydra-engine bench` lists all" in here("bench", "sere").stderr


def test_without_the_source_tree_there_is_the_load_generator(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hydra_terminal.bench._FOLDER", tmp_path)
    *lines, last = here("bench").stdout.splitlines()
    assert lines[1].split()[0] == "serve" and last.startswith("Others than `serve`") and "from a clone" in last
    assert "'ops.linear'; others than `serve` are part of the source tree" in here("bench", "ops.linear").stderr
    assert here("bench", "serve", "--help").returncode == 0


def test_benchmarks_are_listed_by_what_they_measure(here: Here) -> None:
    lines = here("bench").stdout.splitlines()
    titles = [line for line in lines if not line.startswith(" ")]
    assert len(titles) == 4 and all(title.endswith(":") for title in titles)
    assert lines.index(titles[2]) < next(at for at, line in enumerate(lines) if line.split()[0] == "ops.linear")
    assert max(map(len, lines)) <= 100 and not any("..." in line or line.endswith("..") for line in lines)
    told = re.sub(r"\n {4,}", " ", "\n".join(lines)).splitlines()
    assert all(line.endswith((".", ":")) for line in told), "whole sentences"


@pytest.mark.parametrize("asked", [(), ("help",), ("--help",)], ids=" ".join)
def test_without_a_command_there_is_help(asked: tuple[str, ...], here: Here) -> None:
    done = here(*asked)
    assert done.returncode == 0 and done.stdout.startswith("usage: hydra-engine") and not done.stderr
    assert "run-batch" in done.stdout


def test_flags_are_looked_for_where_they_are(here: Here) -> None:
    assert here("serv").stderr.splitlines()[1] == "Try `hydra-engine --help`."
    found = here("--help", "port")
    assert found.returncode == 2 and found.stdout.endswith(
        "; commands have flags, try `hydra-engine serve --help port`.\n"
    )
    switch = here("serve", "--help", "prefetch").stdout
    assert "  --prefetch-features, --no-prefetch-features\n" in switch


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("--bogus",), "--bogus is not an option; a command comes first, as in `hydra-engine serve demo`"),
        (("--model", "demo"), "a command is missing, as in `hydra-engine serve --model ...`"),
        (("--max_num_seqs=3", "serve"), "a command is missing, as in `hydra-engine serve --max-num-seqs ...`"),
        (("-m", "x.gguf"), "-m is not an option here: name the model as MODEL or with --model; a command comes first"),
        (("ps",), "'ps' is not a command here: every server is a process of its own"),
        (("launch_server", "--port", "1"), "'launch_server' is not a command here: write `hydra-engine serve MODEL`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_no_command_is_told_what_to_write(typed: tuple[str, ...], said: str, here: Here) -> None:
    done = here(*typed)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"hydra-engine: {said}") and len(done.stderr.splitlines()) == 2


def test_help_of_a_command_has_three_spellings(here: Here) -> None:
    first, *others = (here(*words).stdout for words in (("serve", "--help"), ("--help", "serve"), ("help", "serve")))
    assert first.startswith("usage: hydra-engine serve") and others == [first, first]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("srve", "serve"), ("server", "serve"), ("run-bath", "run-batch"), ("Chat", "chat"), ("zzz", "")],
)
def test_a_mistyped_command_is_told_which_was_meant(typed: str, meant: str, here: Here) -> None:
    for words in ((typed, "--port", "1"), ("help", typed)):
        done = here(*words)
        assert done.returncode == 2 and not done.stdout
        wanted = f"{typed!r} is not a command" + (f"; did you mean {meant}?" if meant else "")
        assert done.stderr.splitlines()[0] == f"hydra-engine: {wanted}"


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        (
            ("serve", "-hf", "org/name-GGUF"),
            "-hf is not an option here: a Hugging Face name is MODEL, as in `hydra-eng",
        ),
        (("serve", "-h8"), "-h8 is not an option"),
        (("generate", "x", "-p", "y"), "-p is not an option here: ask with `hydra-engine run MODEL QUESTION`"),
        (("serve", "demo", "-c", "4096"), "-c is not an option here: give --max-model-len"),
        (("serve", "demo", "--ctx-size=4096"), "--ctx-size is not an option here: give --max-model-len"),
        (("serve", "--context_length", "4096"), "--context-length is not an option here: give --max-model-len"),
        (("serve", "demo", "-ngl", "99"), "-ngl is not an option here: a model runs on one device"),
        (("serve", "demo", "--tp-size", "2"), "--tp-size is not an option here: a model runs on one device"),
        (("generate", "x", "-n", "5"), "-n is not an option here: the length of an answer is set by the request"),
        (("serve", "--mem-fraction-static", "0.8"), "give --gpu-memory-utilization"),
        (("demo", "--model", "x"), "--model is not an option here: the demo's questions are about its own model"),
        (("serve", "--max-num-sequences", "2"), "--max-num-sequences is not an option; the nearest one is --max-num"),
        (("serve", "--disable-radix-cache"), "--disable-radix-cache is not an option here: give --no-prefix-caching"),
        (("serve", "--async-scheduling"), "--async-scheduling is not an option here: give --look-ahead"),
        (("serve", "--mm-processor-cache-gb", "1"), "is not an option here: give --pixel-cache-mib"),
        (("serve", "--kv-transfer-config", "{}"), "decode with --topology"),
        (("serve", "demo", "--task", "generate"), "every model here generates; leave it out"),
        (("serve", "demo", "--download-dir", "/tmp"), "set HF_HOME in the environment"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_names_of_other_engines_are_explained(typed: tuple[str, ...], instead: str, here: Here) -> None:
    done = here(*typed)
    assert done.returncode == 2 and instead in done.stderr.splitlines()[0]


def test_switches_of_what_is_so_anyway_are_taken_with_a_note(here: Here, tmp_path: Path) -> None:
    words = ("--enable-reasoning", "--jinja", "--cont_batching=true", "--tensor-parallel-size", "1", "--tp=1")
    done = here("config", *words, "--max-num-seqs", "3")
    assert done.returncode == 0 and "max-num-seqs: 3" in done.stdout
    notes = done.stderr.splitlines()
    assert [note.split()[:3] for note in notes] == [
        ["hydra-engine:", "note:", name]
        for name in ("--enable-reasoning", "--jinja", "--cont-batching", "--tensor-parallel-size", "--tp")
    ]
    assert notes[0].endswith("--reasoning-parser sets its marks")
    file = tmp_path / "options.yaml"
    file.write_text("enable-auto-tool-choice: true\nmax-num-seqs: 4\n")
    done = here("config", "--config", str(file))
    assert done.returncode == 0 and "max-num-seqs: 4" in done.stdout
    assert done.stderr.startswith("hydra-engine: note: enable-auto-tool-choice (line 1 of the configuration file)")
    file.write_text("enable-auto-tool-choice: false\n")
    done = here("config", "--config", str(file))
    assert done.returncode == 2 and "tools are on if the chat template supports them" in done.stderr
    done = here("serve", "--enable-auto-tool-choice=false")
    assert done.returncode == 2 and "--enable-auto-tool-choice is not an option here: tools are on" in done.stderr


@pytest.mark.parametrize("name", ["code-revision", "tokenizer-pool", "max-log-len", "additional-config", "headless"])
def test_a_name_that_only_looks_a_little_like_another_is_not_taken_for_it(name: str, here: Here) -> None:
    assert here("serve", f"--{name}").stderr.splitlines()[0].endswith(f"--{name} is not an option")


def test_what_is_told_to_give_instead_is_an_option() -> None:
    _, commands = build_parser()
    flags = {flag.removeprefix("--") for parser in commands.values() for flag in parser.flags()}
    tables = (other_engines.INSTEAD, other_engines.ANYWAY)
    told = {flag for table in tables for reason in table for flag in FLAG.findall(reason)}
    assert told and told <= flags
    names = [name for table in tables for several in table.values() for name in several]
    assert len(set(names)) == len(names)
    serve = {flag.removeprefix("--") for flag in commands["serve"].flags()}
    assert not set(names) - {"model"} & serve
    hints, others = other_engines._COMMANDS, [*other_engines._COMMANDS.values()]
    written = {name for hint in (*hints, *other_engines.INSTEAD) for name in re.findall(r"hydra-engine ([\w-]+)", hint)}
    assert written and written <= set(commands) and not written & {word for words in others for word in words}


def test_a_model_is_named_in_its_place_or_with_a_flag(here: Here) -> None:
    for command in ("config", "memory", "profile", "serve"):
        assert "--model MODEL" in here(command, "--help").stdout
    for words in (("/m/x",), ("--model", "/m/x"), ("--model=/m/x", "/m/x"), ("--port", "1", "--model", "/m/x")):
        assert "model: /m/x" in here("config", *words).stdout
    done = here("config", "--model", "/m/x", "/m/y")
    assert done.returncode == 2 and "'/m/x' and '/m/y' are given for one MODEL" in done.stderr


def test_run_batch_takes_its_files_as_vllm_does(here: Here, tmp_path: Path) -> None:
    absent, answers = str(tmp_path / "absent.jsonl"), str(tmp_path / "answers.jsonl")
    for words in (
        (absent, "-o", answers),
        ("-i", absent, "-o", answers),
        ("--input-file", absent, "--output", answers),
    ):
        done = here("run-batch", *words)
        assert done.returncode == 2 and f"the file of requests {absent} cannot be opened: no such file" in done.stderr
    done = here("run-batch", "-o", answers)
    assert done.returncode == 2 and "run-batch FILE -o FILE" in done.stderr


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    _, commands = build_parser()
    assert {"serve", "generate", "chat", "demo", "bench", "memory", "config", "doctor", "completion"} <= set(commands)
    for command in commands:
        for arguments in ([command, "--help"], ["--help", command]):
            with pytest.raises(SystemExit) as ended:
                main(arguments)
            text = capsys.readouterr().out
            assert ended.value.code in (0, None) and text.startswith("usage: hydra-engine"), command
            assert max(map(len, text.splitlines())) <= 100
            assert len(text.split("\n\n")[0].splitlines()) == 1, command


def test_sizes_in_bytes_are_told_in_mib_too(here: Here) -> None:
    assert "(default: 20971520, 20 MiB)" in " ".join(here("serve", "--help", "max-image-bytes").stdout.split())


@pytest.mark.parametrize(
    "command",
    [
        ("config",),
        *(pytest.param(words, marks=pytest.mark.slow) for words in (("--help",), ("doctor",), ("completion", "zsh"))),
    ],
    ids=" ".join,
)
def test_a_closed_pipe_ends_a_command_without_a_word(command: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    line = [sys.executable, "-m", "hydra_engine", *command]
    done = subprocess.run(line, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
def test_an_answer_that_nobody_reads_ends() -> None:
    line = [sys.executable, "-m", "hydra_engine", "generate", "Tell me a story.", "--temperature", "2"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(60) == 141 and process.stderr.read() == ""


@pytest.mark.slow
def test_a_full_disk_is_one_sentence() -> None:
    with open("/dev/full", "wb") as full:
        line = [sys.executable, "-m", "hydra_engine", "config"]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60)
    sentence = "hydra-engine: standard output cannot be written: no space left on device\n"
    assert (done.returncode, done.stderr) == (4, sentence)


def test_help_loads_no_torch() -> None:
    code = (
        "import sys, contextlib, io\nfrom hydra_engine.__main__ import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main(['serve', '--help'])\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


HANGUP = """
import os, signal
import hydra_engine.cli.commands
from hydra_engine.__main__ import main

def run(arguments):
    os.kill(os.getpid(), signal.SIGHUP)
    return 0

hydra_engine.cli.commands.runner = lambda name: run
raise SystemExit(main())
"""


@pytest.mark.parametrize(("command", "code"), [("serve", 0), ("doctor", -signal.SIGHUP)])
def test_a_hangup_ends_what_somebody_types_and_no_server_that_starts(command: str, code: int) -> None:
    line = [sys.executable, "-c", f"import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n{HANGUP}", command]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("SIGHUP changes nothing yet") == (code == 0)


def test_a_command_that_a_program_runs_leaves_its_signals_and_its_collector_alone() -> None:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [*map(signal.getsignal, signals), gc.get_threshold()]
    with pytest.raises(SystemExit):
        main(["serve", "--nonsense"])
    assert [*map(signal.getsignal, signals), gc.get_threshold()] == before


def test_a_server_takes_all_the_descriptors_there_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Spawning(Exception):
        pass

    def spawn(*_: object) -> None:
        raise Spawning

    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    monkeypatch.setattr("hydra_engine.cluster.spawn.spawn", spawn)
    with pytest.raises(Spawning):
        serve.start(EngineConfig(), ServerConfig())
    assert limits[1:] == [(4096, 4096)], "before there are instances, which inherit it"

    def refuse(_kind: int, _limit: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    with caplog.at_level("INFO"), pytest.raises(Spawning):
        serve.start(EngineConfig(), ServerConfig())
    assert "at most 4096 files can be open at once" in caplog.text

"""Every command as a person types it: in a process once, and in this one for what differs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hydra_engine.__main__ import main
from hydra_engine.backend.cuda_device import probe
from hydra_engine.cli.commands import build_parser
from tests.cli.conftest import Here

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
    done = hydra("generate", "Describe the picture.", "--image", PICTURE, "--timeline")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("There is") and "prefill" in done.stdout


def test_generate_says_what_is_wrong_and_ends_with_its_code() -> None:
    done = hydra("generate", "x", "--image", "no-such-file.png")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("hydra-engine: ") and "cannot be opened" in last


def test_generate_says_what_is_wrong(here: Here) -> None:
    for arguments, code, words in (
        (("x", "--temperature", "9"), 1, "temperature"),
        (("x", "--model", "no-such-folder"), 3, "no model directory"),
        (("x", "--kv-cache-gib", "0.000001"), 4, "KV cache"),
        (("x", "--config", "no-such-file.yaml"), 2, "configuration file"),
        (("x", "--tpot-slo", "soon"), 2, "--tpot-slo"),
    ):
        done = here("generate", *arguments, "--threads", "1")
        assert done.returncode == code, (arguments, done.stderr)
        assert done.stderr.strip().splitlines()[-1].startswith("hydra-engine: ") and words in done.stderr
        assert "Traceback" not in done.stderr


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


def test_help_loads_no_torch() -> None:
    code = (
        "import sys, contextlib, io\nfrom hydra_engine.__main__ import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main(['serve', '--help'])\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "False", done.stderr

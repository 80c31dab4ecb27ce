"""Loading: every layout and generation of names gives the same model, every damage is refused in one sentence."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydra_engine.backend.base import Backend
from hydra_engine.backend.select import create_backend
from hydra_engine.core.instances import EPD, Role
from hydra_engine.errors import CheckpointError
from hydra_engine.models.build import load_model
from hydra_engine.models.specs.registry import load_spec
from tests.models.conftest import CheckpointFactory
from tests.models.driver import Driver, Span
from tests.models.reference_hf import TransformersModel

NORM = "language_model.model.norm.weight"
QUERY = "language_model.model.layers.1.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"
PROJECTOR = "multi_modal_projector.linear_1.weight"


@pytest.fixture
def backend() -> Backend:
    return create_backend("cpu", torch.float32, backend="reference", threads=1)


@pytest.fixture
def model_dir(checkpoint: CheckpointFactory, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(checkpoint("gqa"), tmp_path / "model"))


@pytest.fixture
def sharded_dir(checkpoint: CheckpointFactory, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("sharded", max_shard_size="200KB"), tmp_path / "sharded"))


def logits(directory: Path, backend: Backend) -> Tensor:
    driver = Driver(directory, backend)
    pixels = torch.arange(28 * 28 * 3).remainder(251).to(torch.uint8).view(1, 28, 28, 3)
    (slots,) = driver.encode([Span(pixels, (28, 28), (1, 4, 4), 16)])
    return driver.run(driver.request([1, *[5] * 16, 40, 41, 42], [(1, slots)]), [])


def load(directory: Path, backend: Backend, role: str = "EPD") -> object:
    spec = load_spec(directory)
    return load_model(directory, spec, backend, Role.parse(role))


def refusal(directory: Path, backend: Backend, role: str = "EPD") -> str:
    with pytest.raises(CheckpointError) as caught:
        load(directory, backend, role)
    message = caught.value.message
    assert "\n" not in message and str(directory) not in message
    return message


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def rename(tensors: dict[str, Tensor], *pairs: tuple[str, str]) -> None:
    for name in list(tensors):
        for new, other in pairs:
            if name.startswith(new):
                tensors[other + name.removeprefix(new)] = tensors.pop(name)
                break


OLD_FILES = (("vision_tower.", "vision_tower.vision_model."),)
IN_MEMORY = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("vision_tower.", "model.vision_tower."),
)
IN_MEMORY_4 = (*IN_MEMORY[:3], ("vision_tower.", "model.vision_tower.vision_model."))


@pytest.mark.parametrize("pairs", [OLD_FILES, IN_MEMORY, IN_MEMORY_4])
def test_all_generations_of_names_load(model_dir: Path, backend: Backend, pairs: tuple[tuple[str, str], ...]) -> None:
    expected = logits(model_dir, backend)
    rewrite(model_dir, lambda tensors: rename(tensors, *pairs))
    assert torch.equal(logits(model_dir, backend), expected)


def test_buffers_that_old_files_hold_are_ignored(model_dir: Path, backend: Backend) -> None:
    def with_buffers(tensors: dict[str, Tensor]) -> None:
        tensors["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(17)
        tensors["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    rewrite(model_dir, with_buffers)
    load(model_dir, backend)


def test_a_head_that_is_stored_beside_tied_embeddings_counts(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    tied = checkpoint("tied", text={"tie_word_embeddings": True}, tie_word_embeddings=True)
    directory = Path(shutil.copytree(tied, tmp_path / "model"))
    backend = create_backend("cpu", torch.float32, backend="reference", threads=1)
    expected = logits(directory, backend)
    head = torch.randn(262, 64, generator=torch.Generator().manual_seed(1))
    rewrite(directory, lambda t: t.update({"language_model.lm_head.weight": head}))
    assert not torch.allclose(logits(directory, backend), expected)
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    driver, ids = Driver(directory, backend), [1, 40, 41, 42]
    with torch.inference_mode():
        theirs = model(input_ids=torch.tensor([ids])).logits[0]
    assert torch.allclose(driver.run(driver.request(ids), []), theirs, rtol=0, atol=1e-4)


EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.quick("head")
@pytest.mark.parametrize("kept", ["head", "embeddings", "both"])
@pytest.mark.parametrize("sharded", [False, True])
def test_of_tied_matrices_either_will_do(
    checkpoint: CheckpointFactory, tmp_path: Path, kept: str, sharded: bool
) -> None:
    """The file has either name, or both; a second one that an index lists need not be there."""
    options = {"max_shard_size": "60KB"} if sharded else {}
    tied = checkpoint(f"tied-text-{sharded}", "llama", text={"tie_word_embeddings": True}, **options)
    directory = Path(shutil.copytree(tied, tmp_path / "model"))
    file = next(path for path in sorted(directory.glob("*.safetensors")) if EMBEDDINGS in load_file(path))
    tensors = load_file(file)
    tensors[HEAD] = tensors[EMBEDDINGS].clone()
    if kept != "both":
        del tensors[EMBEDDINGS if kept == "head" else HEAD]
    save_file(tensors, file, metadata={"format": "pt"})
    if sharded:
        relist(directory, **{HEAD: file.name})
    driver, ids = Driver(directory, create_backend("cpu", torch.float32, threads=1)), [1, 40, 41, 42]
    found = driver.run(driver.request(ids), [])
    assert torch.allclose(found, TransformersModel(directory).logits(ids), rtol=0, atol=1e-4)
    untied = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(untied))
    if kept != "both":
        with pytest.raises(CheckpointError, match=f"missing: {EMBEDDINGS if kept == 'head' else HEAD}"):
            Driver(directory, driver.backend)


def test_shards_give_the_same_model(sharded_dir: Path, tmp_path: Path, backend: Backend) -> None:
    shards = sorted(sharded_dir.glob("model-*.safetensors"))
    assert len(shards) > 3
    expected = logits(sharded_dir, backend)
    single = Path(shutil.copytree(sharded_dir, tmp_path / "single"))
    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    for path in [*single.glob("model-*.safetensors"), single / "model.safetensors.index.json"]:
        path.unlink()
    save_file(tensors, single / "model.safetensors")
    assert torch.equal(logits(single, backend), expected)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_stored_dtypes_are_converted(model_dir: Path, backend: Backend, stored: torch.dtype) -> None:
    rewrite(model_dir, lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}))
    narrowed = logits(model_dir, backend)
    rewrite(model_dir, lambda tensors: tensors.update({name: t.float() for name, t in tensors.items()}))
    assert torch.equal(logits(model_dir, backend), narrowed)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_matrices_stay_in_16_bits_beside_float32_and_give_the_same_logits(model_dir: Path, stored: torch.dtype) -> None:
    native, spec = create_backend("cpu", torch.float32, threads=1), load_spec(model_dir)
    rewrite(model_dir, lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}))
    narrow, kept = logits(model_dir, native), load_model(model_dir, spec, native, EPD)
    in_file = sum(t.nbytes for t in load_file(model_dir / "model.safetensors").values())
    rewrite(model_dir, lambda tensors: tensors.update({name: t.float() for name, t in tensors.items()}))
    assert torch.equal(logits(model_dir, native), narrow)
    assert kept.weights_bytes < 1.25 * in_file  # vectors are wide, and the panels of the miniature padded
    assert load_model(model_dir, spec, native, EPD).weights_bytes > 1.6 * kept.weights_bytes


def test_progress_counts_the_bytes_of_the_role(model_dir: Path, backend: Backend) -> None:
    totals = {}
    for role in ("E", "P", "D", "EPD"):
        seen: list[tuple[int, int]] = []
        load_model(model_dir, load_spec(model_dir), backend, Role.parse(role), lambda a, b, s=seen: s.append((a, b)))
        assert [done for done, _ in seen] == sorted({done for done, _ in seen})
        totals[role] = seen[-1][1]
        assert seen[-1][0] == totals[role]
    assert totals["P"] == totals["D"] and totals["E"] + totals["P"] == totals["EPD"]
    layer_beyond_the_features = 4 * sum(
        t.numel() for n, t in load_file(model_dir / "model.safetensors").items() if "encoder.layers.2." in n
    )
    assert totals["EPD"] + layer_beyond_the_features <= (model_dir / "model.safetensors").stat().st_size


def test_all_misfits_are_named_at_once(model_dir: Path, backend: Backend) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        del tensors[NORM], tensors[QUERY]
        tensors["language_model.model.layers.9.mlp.up_proj.weight"] = torch.ones(2)
        tensors["stray"] = torch.ones(2)
        tensors[PROJECTOR] = torch.ones(64, 47)

    rewrite(model_dir, damage)
    message = refusal(model_dir, backend)
    assert f"missing: {QUERY}, {NORM};" in message
    assert "not expected: language_model.model.layers.9.mlp.up_proj.weight, stray;" in message
    assert f"of the wrong shape: {PROJECTOR} is [64, 47] instead of [64, 48]" in message


def test_many_misfits_are_counted(model_dir: Path, backend: Backend) -> None:
    rewrite(model_dir, lambda tensors: [tensors.pop(name) for name in list(tensors) if "encoder" in name])
    assert " and 24 more" in refusal(model_dir, backend)


def test_misfits_fill_no_log(model_dir: Path, backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    many = {f"{number}{'x' * 500}": torch.ones(1) for number in range(1200)}
    rewrite(model_dir, lambda tensors: tensors.update(many))
    assert "not expected: " in refusal(model_dir, backend)
    assert len(caplog.messages) == 1001 and max(map(len, caplog.messages)) < 300
    assert caplog.messages[-1] == "weights: not expected: 200 more"


def test_a_role_is_not_bothered_by_the_other_half(model_dir: Path, backend: Backend) -> None:
    rewrite(model_dir, lambda tensors: tensors.pop(NORM))
    load(model_dir, backend, "E")
    assert NORM in refusal(model_dir, backend, "D")


@pytest.mark.parametrize("name", [NORM, QUERY, PROJECTOR, "vision_tower.embeddings.class_embedding"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(model_dir: Path, backend: Backend, name: str, value: float) -> None:
    rewrite(model_dir, lambda tensors: tensors[name].view(-1)[-1].fill_(value))
    message = refusal(model_dir, backend)
    assert name in message and "not finite" in message


def test_a_value_beyond_the_compute_dtype_is_refused(model_dir: Path) -> None:
    rewrite(model_dir, lambda tensors: tensors[NORM].fill_(1e30))
    load(model_dir, create_backend("cpu", torch.float32, backend="reference", threads=1))
    message = refusal(model_dir, create_backend("cpu", torch.float16, backend="reference", threads=1))
    assert NORM in message and "float16" in message


def test_a_missing_shard_is_named(sharded_dir: Path, backend: Backend) -> None:
    shard = sorted(sharded_dir.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert refusal(sharded_dir, backend).endswith(f"missing: {shard.name}")


def test_a_shard_with_a_name_that_no_file_has_is_missing(sharded_dir: Path, backend: Backend) -> None:
    name = "x" * 5000 + ".safetensors"
    relist(sharded_dir, **{NORM: name})
    assert refusal(sharded_dir, backend).endswith(f"missing: {name[:120]}")


def shards_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


def add(path: Path, **tensors: Tensor) -> None:
    save_file(load_file(path) | tensors, path)


def shard_with(directory: Path, name: str) -> Path:
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][name]


def relist(directory: Path, **places: str) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"] |= places
    (directory / INDEX).write_text(json.dumps(index))


def rename_shards(directory: Path) -> None:
    """Gives the shards names such as Qwen3.5's have."""
    index = json.loads((directory / INDEX).read_text())
    names = {
        path.name: f"model.safetensors-{path.stem.removeprefix('model-')}.safetensors" for path in shards_of(directory)
    }
    for old, new in names.items():
        (directory / old).rename(directory / new)
    index["weight_map"] = {name: names[file] for name, file in index["weight_map"].items()}
    (directory / INDEX).write_text(json.dumps(index))


BUFFER = "language_model.model.layers.0.self_attn.rotary_emb.inv_freq"
HARMLESS: dict[str, Callable[[Path], object]] = {
    "a buffer that the index does not list": lambda d: add(shards_of(d)[0], **{BUFFER: torch.ones(8)}),
    "a buffer that no file holds": lambda d: relist(d, **{BUFFER: shards_of(d)[0].name}),
    "a buffer in another shard": lambda d: (
        add(shards_of(d)[0], **{BUFFER: torch.ones(8)}),
        relist(d, **{BUFFER: shards_of(d)[1].name}),
    ),
    "a tensor that nobody knows and the index does not list": lambda d: add(shards_of(d)[1], stray=torch.ones(2)),
    "a shard left over": lambda d: save_file({NORM: torch.ones(64)}, d / "model-00099-of-00099.safetensors"),
    "a tensor twice": lambda d: add(
        next(path for path in shards_of(d) if path != shard_with(d, NORM)), **{NORM: torch.ones(64)}
    ),
    "a tensor twice, under another generation of its name": lambda d: add(
        shards_of(d)[0], **{NORM.replace("language_model.model.", "model.language_model."): torch.ones(64)}
    ),
    "no metadata": lambda d: (d / INDEX).write_text(
        json.dumps({"weight_map": json.loads((d / INDEX).read_text())["weight_map"]})
    ),
    "a tensor that is not listed": lambda d: (d / INDEX).write_text(
        json.dumps(
            {"weight_map": {k: v for k, v in json.loads((d / INDEX).read_text())["weight_map"].items() if k != NORM}}
        )
    ),
    "names of Qwen3.5": rename_shards,
}


@pytest.mark.parametrize("case", HARMLESS)
def test_an_index_is_a_list_of_what_counts(sharded_dir: Path, backend: Backend, case: str) -> None:
    expected = logits(sharded_dir, backend)
    HARMLESS[case](sharded_dir)
    assert torch.equal(logits(sharded_dir, backend), expected)


def test_an_index_that_lies_is_refused(sharded_dir: Path, backend: Backend) -> None:
    other = next(path for path in shards_of(sharded_dir) if path != shard_with(sharded_dir, NORM))
    relist(sharded_dir, **{NORM: other.name})
    assert f"in another file than the index says: {NORM}" in refusal(sharded_dir, backend)
    relist(sharded_dir, **{NORM: "../model.safetensors"})
    assert "outside" in refusal(sharded_dir, backend)


def test_what_is_needed_is_in_one_place(sharded_dir: Path, backend: Backend) -> None:
    """A needed tensor that the index does not list, or lists for a file that lacks it, is refused; one that the index
    lists and the model does not need is refused too."""
    index = json.loads((sharded_dir / INDEX).read_text())
    held = index["weight_map"].pop(NORM)
    (sharded_dir / INDEX).write_text(json.dumps(index))
    other = next(path for path in shards_of(sharded_dir) if path.name != held)
    add(other, **{NORM: torch.ones(64)})
    assert f"in another file than the index says: {NORM}" in refusal(sharded_dir, backend)
    for path in (other, sharded_dir / held):
        tensors = load_file(path)
        del tensors[NORM]
        save_file(tensors, path)
    relist(sharded_dir, **{NORM: held})
    assert f"missing: {NORM}" in refusal(sharded_dir, backend)
    relist(sharded_dir, stray=held)
    add(sharded_dir / held, stray=torch.ones(2))
    assert "not expected: stray" in refusal(sharded_dir, backend)


def test_truncated_files_are_refused(model_dir: Path, backend: Backend) -> None:
    path = model_dir / "model.safetensors"
    data = path.read_bytes()
    for length, words in ((len(data) - 1, "truncated"), (5000, "truncated"), (4, "too short"), (0, "too short")):
        path.write_bytes(data[:length])
        assert words in refusal(model_dir, backend) and path.name in refusal(model_dir, backend)


def test_a_file_that_shrinks_while_it_is_read_is_refused(model_dir: Path, backend: Backend) -> None:
    path = model_dir / "model.safetensors"

    def shrink(done: int, total: int) -> None:
        with open(path, "r+b") as file:
            file.truncate(20_000)

    with pytest.raises(CheckpointError, match="truncated"):
        load_model(model_dir, load_spec(model_dir), backend, EPD, shrink)


def write_header(path: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


HEADER_DAMAGE: dict[str, Callable[[dict[str, dict[str, object]]], object]] = {
    "negative offset": lambda h: h[NORM].update(data_offsets=[-256, 0]),
    "length of another shape": lambda h: h[NORM].update(shape=[63]),
    "fractional shape": lambda h: h[NORM].update(shape=[64.0]),
    "no dtype": lambda h: h[NORM].pop("dtype"),
    "unknown dtype": lambda h: h[NORM].update(dtype="F128"),
    "not an object": lambda h: h.update({NORM: 3}),  # type: ignore[dict-item]
    "overlap": lambda h: h[NORM].update(
        data_offsets=h["language_model.model.layers.0.input_layernorm.weight"]["data_offsets"]
    ),
    "beyond the end": lambda h: h[NORM].update(data_offsets=[1 << 40, (1 << 40) + 256]),
}


@pytest.mark.parametrize("damage", HEADER_DAMAGE)
def test_lying_headers_are_refused(model_dir: Path, backend: Backend, damage: str) -> None:
    write_header(model_dir / "model.safetensors", HEADER_DAMAGE[damage])
    assert "model.safetensors" in refusal(model_dir, backend)


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 64, struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 2) + b"{x"],
)
def test_files_of_another_kind_are_refused(model_dir: Path, backend: Backend, data: bytes) -> None:
    (model_dir / "model.safetensors").write_bytes(data)
    assert "not a safetensors file" in refusal(model_dir, backend)


def test_quantised_tensors_are_refused(model_dir: Path, backend: Backend) -> None:
    rewrite(model_dir, lambda tensors: tensors.update({NORM: torch.ones(64, dtype=torch.int8)}))
    assert (
        refusal(model_dir, backend)
        == f"tensor {NORM} in model.safetensors is stored as I8; supported are F64, F32, F16, BF16, "
        "and other types where config.json has a quantization_config"
    )


def test_a_tensor_under_two_names_is_refused(model_dir: Path, backend: Backend) -> None:
    rewrite(model_dir, lambda tensors: tensors.update({"model.language_model.norm.weight": torch.ones(64)}))
    assert "twice" in refusal(model_dir, backend)


def test_pickled_weights_are_refused_unopened(model_dir: Path, backend: Backend) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    assert "convert them to safetensors" in refusal(model_dir, backend)


def test_a_directory_without_weights_is_refused(model_dir: Path, backend: Backend) -> None:
    (model_dir / "model.safetensors").unlink()
    assert "neither model.safetensors nor" in refusal(model_dir, backend)
    (model_dir / "model.safetensors").mkdir()
    assert "cannot be read" in refusal(model_dir, backend)
    (model_dir / "model.safetensors").rmdir()
    (model_dir / "model.safetensors").symlink_to("model.safetensors")
    assert "neither model.safetensors nor" in refusal(model_dir, backend)

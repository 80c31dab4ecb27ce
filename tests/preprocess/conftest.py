"""Small tokenizers, a LLaVA-like spec and a preprocessor over them; nothing is downloaded and no torch is needed."""

from __future__ import annotations

import asyncio
import io
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hydra_engine.config import MediaConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.models.specs.base import (
    ItemPlan,
    LanguageSpec,
    MediaPlan,
    ModelSpec,
    PreprocessSpec,
    VideoInfo,
    VideoPlan,
    View,
    no_videos,
)
from hydra_engine.models.specs.vision import shortest_edge_size
from hydra_engine.preprocess.preprocessor import Prepared, Preprocessor
from hydra_engine.preprocess.sandbox import fetch_child, fetch_process
from hydra_engine.preprocess.sandbox.fetch_child import Ready
from hydra_engine.preprocess.text.tokenizer import Tokenizer, load_tokenizer
from tests import forkserver
from tests.calls import asked
from tests.preprocess.in_process import preprocessor_of

CERTIFICATE = Path(__file__).parent / "tls" / "certificate.pem"  # of pictures.test and 127.0.0.1, signed by itself

SPECIALS = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<image>"]
CORPUS = [
    "the cat sat on the mat, and the dog sat on the log. What is in this picture?",
    "ünïcödé straße 日本語の文章 🎉🎈 naïve café e\u0301",
    "def f(x):\n    return x + 1\n\n\tThere are 12345 apples.",
]
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|' + (message['role'] if message['role'] in ['system', 'assistant'] else 'user') + '|>' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- '<image>' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def build_byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def build_sentencepiece_like() -> Backend:
    """A tokenizer like Llama 2's: spaces as ▁, bytes as <0x..> where the alphabet ends, the first space dropped."""
    letters = [*sorted({char for text in CORPUS[::2] for char in text if not char.isspace()}), "▁"]
    tokens = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁t", "he", "▁the", "at"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "t")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIALS)
    return backend


def build_wordpiece() -> Backend:
    words = ["the", "cat", "sat", "on", "mat", "dog", "log", "what", "is", "in", "this", "picture", ".", ",", "?"]
    tokens = ["[UNK]", *SPECIALS, *words, *(f"##{piece}" for piece in ("s", "ed", "ing", "er"))]
    backend = Backend(models.WordPiece(vocab={t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(SPECIALS)
    return backend


BUILDERS = {
    "byte_level": build_byte_level,
    "sentencepiece_like": build_sentencepiece_like,
    "wordpiece": build_wordpiece,
}


def wrap(backend: Backend) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIALS[2:],
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(autouse=True)
def children_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxed children are what is tested here."""
    monkeypatch.setenv(forkserver.EXEC_VARIABLE, "1")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = wrap(build_byte_level())
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return load_tokenizer(model_dir)


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: Tokenizer(wrap(build())) for name, build in BUILDERS.items()}


PREPROCESS = PreprocessSpec(
    resample="bicubic",
    rescale=1 / 255,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
    identity="test-28",
)


@dataclass(frozen=True)
class SquareVision:
    """The geometry of LLaVA: every picture becomes one square of the same number of tokens."""

    preprocess: PreprocessSpec = PREPROCESS
    feature_size: int = 8
    num_planes: int = 1
    max_tokens_per_image: int = 4
    max_tokens_per_item: int = 4
    max_patches_per_image: int = 4
    processor: None = None

    def plan_image(self, width: int, height: int, budget: PixelBudget = AS_CONFIGURED) -> MediaPlan:
        resized = shortest_edge_size(width, height, 28)
        corner = (-((resized[0] - 28) // 2), -((resized[1] - 28) // 2))
        return MediaPlan((View(resized, (28, 28), corner, (28, 28)),), (ItemPlan(28, 28, 1, 4, 4, (1, 2, 2)),))

    def plan_video(self, video: VideoInfo) -> VideoPlan:
        raise no_videos()

    def num_parameters(self) -> int:
        return 0

    def flops(self, num_patches: int) -> int:
        return num_patches


def make_spec(tokenizer: Tokenizer, *, vision: bool = True) -> ModelSpec:
    language = LanguageSpec(2, 64, 4, 2, 16, 128, tokenizer.vocab_size, 1e-5, 1e4, 256, True)
    image_token_id = tokenizer._backend.token_to_id("<image>") if vision else None
    return ModelSpec(
        "llava",
        "LlavaForConditionalGeneration",
        language,
        SquareVision() if vision else None,
        image_token_id,
        tokenizer._tokenizer.bos_token_id,
        None,
        (1,),
        "float32",
    )


class Kitchen:
    """A preprocessor with short ways to use it."""

    def __init__(self, preprocessor: Preprocessor) -> None:
        self.preprocessor = preprocessor
        self.num_requests = 0

    async def prepare(
        self, prompt: Any = None, images: Any = None, arrival_s: float | None = None, **options: Any
    ) -> Prepared:
        sampling = SamplingParams(**options.pop("sampling", {}))
        self.num_requests += 1
        call = asked(prompt, messages=options.pop("messages", None), images=images)
        call = replace(call, sampling=sampling, **options)
        return await self.preprocessor.prepare(RequestId(self.num_requests), call, arrival_s=arrival_s)


@pytest.fixture
async def make_preprocessor(tokenizer: Tokenizer) -> Any:
    made: list[Preprocessor] = []

    def make(*, vision: bool = True, max_model_len: int = 256, media: dict[str, Any] | None = None, **more: Any) -> Any:
        chosen = more.pop("tokenizer", tokenizer)
        spec, limits = make_spec(chosen, vision=vision), MediaConfig(**(media or {}))
        preprocessor = preprocessor_of(spec, chosen, limits, max_model_len=max_model_len, **more)
        made.append(preprocessor)
        return Kitchen(preprocessor)

    yield make
    for preprocessor in made:
        await preprocessor.close()


@pytest.fixture
def kitchen(make_preprocessor: Callable[..., Kitchen]) -> Kitchen:
    return make_preprocessor()


@pytest.fixture
def encoded() -> Callable[..., bytes]:
    """A picture as the bytes of a file."""

    def encode(image: Image.Image | None = None, format: str = "PNG", **options: Any) -> bytes:
        buffer = io.BytesIO()
        (image or noise(40, 30)).save(buffer, format, **options)
        return buffer.getvalue()

    return encode


def noise(width: int, height: int, seed: int = 0, channels: int = 3) -> Image.Image:
    """Smooth enough for lossy formats, different everywhere."""
    generator = np.random.default_rng(seed)
    small = generator.integers(0, 256, (max(1, height // 4), max(1, width // 4), channels), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def picture() -> Callable[..., Image.Image]:
    return noise


@cache
def _context() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(CERTIFICATE))


class _ChildHere:
    """A fetch child that is a task of this loop."""

    def __init__(self, theirs: socket.socket) -> None:
        connection = theirs.dup()
        self._task = asyncio.get_running_loop().create_task(self._serve(connection))
        self._task.add_done_callback(lambda _task: connection.close())  # where it has not even begun

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            await fetch_child.serve(connection, _context(), Ready())

    def kill(self) -> None:
        self._task.cancel()

    def wait(self) -> int:
        return -signal.SIGKILL


@pytest.fixture
def fetch_child_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads what hosts send in this process, where it can be looked at and no child has to start."""
    monkeypatch.setattr(fetch_process, "_spawn", _ChildHere)

"""Prompts of MiniCPM-V 2.6 as the published code makes them: pictures among the texts, marked and numbered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from PIL import Image

from hydra_engine.config import MediaConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.preprocess.text.tokenizer import load_tokenizer
from tests.calls import asked
from tests.models.families.minicpmv2_6 import Processor
from tests.preprocess.in_process import preprocessor_of
from tests.preprocess.published import tokenizer_files
from tools.miniatures import TINY, build_config
from tools.miniatures.base import save_processor
from tools.miniatures.minicpmv2_6 import MARKS

# Qwen2's, which reads text only.
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a checkpoint but its weights, with Qwen2's kind of tokenizer under the published class's name."""
    directory = tmp_path_factory.mktemp("minicpmv2_6")
    own_code = {"AutoTokenizer": ["", "tokenization_minicpmv_fast.MiniCPMVTokenizerFast"]}
    names = {"auto_map": own_code, "chat_template": TEMPLATE, "unk_token": "<unk>"}
    files = tokenizer_files("qwen2", tuple(MARKS.values()), **names)
    config = build_config("minicpmv", text={"vocab_size": 600})
    config.save_pretrained(directory)
    save_processor(directory, config, TINY["minicpmv"])
    (directory / "chat_template.jinja").unlink()
    (directory / "tokenizer.json").write_text(json.dumps(files.tokenizer))
    settings = {**files.settings, "tokenizer_class": "MiniCPMVTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


async def test_pictures_stand_where_the_published_code_puts_them(model_dir: Path) -> None:
    tokenizer = load_tokenizer(model_dir)
    preprocessor = preprocessor_of(load_spec(model_dir), tokenizer, MediaConfig(), max_model_len=512)
    small, large = (Image.new("RGB", size) for size in ((48, 48), (80, 60)))
    parts: list[str | Image.Image] = ["Compare naïve", large, "\n with ", small, "What's\t<unk> 12?"]
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    turns = [("user", "Hi."), ("assistant", "Hello!")]
    messages = [{"role": role, "content": text} for role, text in turns]
    try:
        prompt = asked(messages=[*messages, {"role": "user", "content": content}])
        prepared = await preprocessor.prepare(RequestId(1), prompt)
    finally:
        await preprocessor.close()
    processor = Processor.of(model_dir)
    numbers = iter(range(2))
    shown = [p if isinstance(p, str) else processor.text(p.size, next(numbers)) for p in parts]
    rendered = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in [*turns, ("user", "\n".join(shown))]]
    text = "".join([*rendered, "<|im_start|>assistant\n"])
    theirs = transformers.Qwen2TokenizerFast.from_pretrained(model_dir)
    ids, same = list(prepared.request.prompt_token_ids), text.partition("What's")[0]
    expected = theirs(same)["input_ids"]
    assert ids[: len(expected)] == expected, "up to what a user typed, which is text here and a token there"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    unknown = load_spec(model_dir).image_token_id
    assert [place for place, id in enumerate(ids) if id == unknown] == [
        place for image in prepared.request.images for place in range(image.start, image.end)
    ]
    assert [image.num_tokens for image in prepared.request.images] == [16] * 6

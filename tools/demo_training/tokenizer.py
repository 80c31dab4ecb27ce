"""The demo model's text side: vocabulary, chat template and processor, in Hugging Face's format.

Every word of the synthetic corpus is one token and a position such as "top-left" is one word, so
looking something up in the picture takes a single step of attention. Other words fall back to
bytes; there is no unknown token.
"""

import random
from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tools.demo_training.scenes import QUESTION_KINDS, ask, invent

PAD, BOS, END, IMAGE = "<pad>", "<s>", "<|end|>", "<image>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, END, SYSTEM, USER, ASSISTANT, IMAGE)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer questions about pictures.",
    "You are a very small vision-language model.",
)

IMAGE_SIZE = 84
PATCH_SIZE = 28  # one patch is one cell of the scene's grid
IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2

# Words keep their leading space and their hyphens; digits stay single, so "1" means the same in 15.
WORDS = r" ?[A-Za-z]+(?:-[A-Za-z]+)*| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+"

# Images go before the text of their message, whatever the order of the parts: that is how training
# saw them. `developer` is another name for `system`; other unknown roles speak as the user.
CHAT_TEMPLATE = """\
{{- '<s>' -}}
{%- for message in messages -%}
{%- if message['role'] in ['system', 'developer'] -%}{{- '<|system|>' -}}
{%- elif message['role'] == 'assistant' -%}{{- '<|assistant|>' -}}
{%- else -%}{{- '<|user|>' -}}
{%- endif -%}
{%- if message['content'] is string -%}{{- message['content'] | trim -}}
{%- else -%}
{%- for part in message['content'] if part['type'] in ['image', 'image_url', 'input_image'] -%}{{- '<image>\\n' -}}
{%- endfor -%}
{%- for part in message['content'] if part['type'] in ['text', 'input_text'] -%}
{%- if not loop.first -%}{{- ' ' -}}{%- endif -%}{{- part['text'] | trim -}}
{%- endfor -%}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def casual(text: str) -> str:
    """The question as typed in a hurry: no capitals, no punctuation."""
    return text.lower().rstrip("?.!")


def corpus(size: int = 20_000, seed: int = 0) -> Iterator[str]:
    """Texts that hold every word the model should know as one token."""
    rng = random.Random(seed)
    yield from SYSTEM_PROMPTS
    for i in range(size):
        asked = ask(QUESTION_KINDS[i % len(QUESTION_KINDS)], rng, invent(rng))
        if asked is not None:
            question, answer = asked
            yield from (question, "\n" + question, casual(question), "\n" + casual(question), answer)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE vocabulary, merged until every word of the corpus is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,  # never reached: merging ends when no pair is left
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT, IMAGE],
        model_max_length=2048,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """The processor that `AutoProcessor` finds again in the saved checkpoint."""
    images = CLIPImageProcessorPil(
        size={"shortest_edge": IMAGE_SIZE},
        crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # the class token of the tower, which "default" drops again
        image_token=IMAGE,
        chat_template=CHAT_TEMPLATE,
    )

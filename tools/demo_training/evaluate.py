"""Score a demo checkpoint on held-out scenes: `python -m tools.demo_training.evaluate`.

Everything goes through transformers' own processor and `generate`, so the score also vouches for
the files of the checkpoint. An answer is right only if it is exactly the expected text.
"""

import argparse
import logging
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration

import hydra_engine
from tools.demo_training.scenes import QUESTION_KINDS, Question, held_out_questions

logger = logging.getLogger(__name__)

MODEL = Path(hydra_engine.__file__).parent / "demo" / "model"


class Answerer:
    """A checkpoint and its processor, answering greedily."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.processor = AutoProcessor.from_pretrained(path)
        self.model = LlavaForConditionalGeneration.from_pretrained(path, dtype=dtype).eval()

    @torch.inference_mode()
    def answer(self, questions: list[Question]) -> list[str]:
        """Answers to questions that either all have a picture or all have none."""
        prompts = []
        for question in questions:
            parts = [{"type": "text", "text": question.text}]
            if question.image is not None:
                parts.insert(0, {"type": "image"})
            messages = [{"role": "user", "content": parts}]
            prompts.append(self.processor.apply_chat_template(messages, add_generation_prompt=True))
        images = [question.image for question in questions if question.image is not None]
        inputs = self.processor(text=prompts, images=images or None, padding=True, return_tensors="pt")
        if images:
            inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        output = self.model.generate(**inputs, max_new_tokens=64, do_sample=False)
        return self.processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def batches(questions: list[Question], size: int) -> Iterator[list[Question]]:
    """The questions in batches of one kind each."""
    for kind in QUESTION_KINDS:
        same = [question for question in questions if question.kind == kind]
        yield from (same[start : start + size] for start in range(0, len(same), size))


def score(
    answerer: Answerer, questions: list[Question], batch: int = 25
) -> tuple[dict[str, float], list[tuple[Question, str]]]:
    """The share of exact answers by question kind, and every question answered wrongly."""
    right: dict[str, list[bool]] = defaultdict(list)
    wrong = []
    for group in batches(questions, batch):
        for question, answer in zip(group, answerer.answer(group), strict=True):
            right[question.kind].append(answer == question.answer)
            if answer != question.answer:
                wrong.append((question, answer))
    return {kind: sum(results) / len(results) for kind, results in right.items()}, wrong


def main() -> None:
    """Command line: scores by question kind, and the first wrong answers on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("-n", type=int, default=200, help="questions of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=336, help="side of the pictures in pixels")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--show", type=int, default=0, help="wrong answers to show")
    args = parser.parse_args()

    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    answerer = Answerer(args.model, getattr(torch, args.dtype))
    questions = held_out_questions(args.n * len(QUESTION_KINDS), args.seed, args.size)
    scores, wrong = score(answerer, questions, args.batch)
    for kind, share in scores.items():
        logger.info("%-13s %.3f", kind, share)
    logger.info("%-13s %.3f", "mean", sum(scores.values()) / len(scores))
    for question, answer in wrong[: args.show]:
        logger.info("%s: %s\n  right: %s\n  given: %s", question.kind, question.text, question.answer, answer)


if __name__ == "__main__":
    main()

"""Train the demo model from scratch: `python -m tools.demo_training.train --out DIR`.

Two stages. *Naming*: the vision tower learns to put the words for colour, kind and position of a
cell into its image token, measured against the text model's own word embeddings. *Answering*: the
whole model learns to answer, on rows of many questions about one picture, asking most often what
it gets wrong. Both use fresh scenes at every step. The run is reproducible for a given seed and
thread count, and `--resume` continues an interrupted one.
"""

import argparse
import logging
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from tools.demo_training.architecture import build_model
from tools.demo_training.batches import Batch, Mixture, Packer, draw_training_picture, to_pixels
from tools.demo_training.scenes import CELLS, COLOURS, KINDS, Scene, invent, invent_for
from tools.demo_training.tokenizer import build_processor, build_tokenizer

logger = logging.getLogger(__name__)

WARM_UP = 100
NAMING_THINGS = 6  # scenes of the naming stage hold up to this many things: more to see per picture
EMPTY_WEIGHT = 0.35  # most cells are empty, which is soon learnt
TOWER_SHARE = 0.3  # learning rate of the tower while answering: it can see already
REPORT_EVERY, SAVE_EVERY = 100, 500


@dataclass(frozen=True)
class Stage:
    """Length and learning rate of a stage of the training."""

    name: str
    steps: int
    rate: float
    batch: int
    flat: float  # share of the steps before the learning rate starts to fall to zero

    def rate_at(self, step: int) -> float:
        falling = (self.steps - step) / (self.steps * (1 - self.flat))
        return self.rate * min(1.0, (step + 1) / WARM_UP, falling)


class Namer:
    """Loss of the naming stage: each image token must be closest to the words for its own cell."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        def ids(words: list[str]) -> Tensor:
            return torch.tensor([tokenizer.encode(f" {word}", add_special_tokens=False)[0] for word in words])

        self.colours = ids(list(COLOURS))
        self.kinds = ids([*KINDS, "nothing"])
        self.plurals = ids([f"{kind}s" for kind in KINDS])
        self.cells = ids(list(CELLS))

    def loss(self, model: LlavaForConditionalGeneration, scenes: list[Scene], pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and which things were named rightly."""
        features = image_features(model, pixels).flatten(0, 1).float()
        features = F.rms_norm(features, features.shape[-1:])
        words = model.get_parameter("model.language_model.embed_tokens.weight").float()
        colour = torch.full((len(scenes), len(CELLS)), -100)
        kind = torch.full_like(colour, len(KINDS))
        for number, scene in enumerate(scenes):
            for thing in scene.things:
                colour[number, thing.cell] = list(COLOURS).index(thing.colour)
                kind[number, thing.cell] = KINDS.index(thing.kind)
        colour, kind = colour.flatten(), kind.flatten()
        cell = torch.arange(len(CELLS)).repeat(len(scenes))
        taken = colour >= 0

        kind_logits, colour_logits = features @ words[self.kinds].T, features @ words[self.colours].T
        balance = torch.tensor([1.0] * len(KINDS) + [EMPTY_WEIGHT])
        loss = F.cross_entropy(kind_logits, kind, weight=balance)
        loss = loss + F.cross_entropy(colour_logits, colour)
        loss = loss + F.cross_entropy(features[taken] @ words[self.plurals].T, kind[taken])
        loss = loss + F.cross_entropy(features @ words[self.cells].T, cell)
        right = (kind_logits.argmax(1) == kind) & (colour_logits.argmax(1) == colour)
        return loss, right[taken]


def image_features(model: LlavaForConditionalGeneration, pixels: Tensor) -> Tensor:
    """The image tokens as the text model gets them."""
    patches = model.model.vision_tower(pixels).last_hidden_state[:, 1:]
    return model.model.multi_modal_projector(patches)


def answer_loss(model: LlavaForConditionalGeneration, batch: Batch) -> tuple[Tensor, list[bool]]:
    """The loss on the answers, and which of them greedy decoding would have got right."""
    bias = torch.zeros(batch.attention_mask.shape).masked_fill(~batch.attention_mask, torch.finfo(torch.bfloat16).min)
    hidden = model.model(
        input_ids=batch.input_ids,
        pixel_values=batch.pixel_values,
        attention_mask=bias.bfloat16(),
        position_ids=batch.position_ids,
        use_cache=False,
    ).last_hidden_state
    logits = model.lm_head(hidden[batch.rows, batch.columns]).float()
    losses = F.cross_entropy(logits, batch.labels, reduction="none")
    wrong = (logits.argmax(1) != batch.labels).float()[: len(batch.answers)]
    missed = torch.zeros(len(batch.kinds)).index_add(0, batch.answers, wrong)
    return (losses * batch.weights).sum() / batch.weights.sum(), (missed == 0).tolist()


class Trainer:
    """The model with its optimiser, and the loop that both stages share."""

    def __init__(self, model: LlavaForConditionalGeneration, seed: int, checkpoint: Path) -> None:
        self.model, self.seed, self.checkpoint = model, seed, checkpoint
        tower = [p for name, p in model.named_parameters() if "vision_tower" in name]
        rest = [p for name, p in model.named_parameters() if "vision_tower" not in name]
        groups = [
            {"params": tower, "weight_decay": 0.05},
            {"params": [p for p in rest if p.ndim > 1], "weight_decay": 0.05},
            {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
        self.mixture = Mixture()

    def save(self, stage: str, step: int) -> None:
        state = {
            "stage": stage,
            "step": step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "errors": self.mixture.errors,
        }
        unfinished = self.checkpoint.with_suffix(".part")
        torch.save(state, unfinished)
        unfinished.replace(self.checkpoint)

    def resume(self) -> tuple[str, int]:
        """Load the checkpoint; returns its stage and the first step still to do."""
        state = torch.load(self.checkpoint)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.mixture.errors = state["errors"]
        return state["stage"], state["step"]

    def run(
        self, stage: Stage, tower_share: float, loss: Callable[[random.Random], tuple[Tensor, str]], first: int
    ) -> None:
        """Train one stage from step `first` on; `loss` makes a batch and returns loss and report."""
        began, total = time.monotonic(), 0.0
        for step in range(first, stage.steps):
            for group, share in zip(self.optimizer.param_groups, (tower_share, 1.0, 1.0), strict=True):
                group["lr"] = stage.rate_at(step) * share
            # A generator per step, so that a resumed run sees the same scenes.
            rng = random.Random(f"{self.seed}-{stage.name}-{step}")
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value, report = loss(rng)
            self.optimizer.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            total += value.item()
            if (step + 1) % REPORT_EVERY == 0:
                mean, total = total / REPORT_EVERY, 0.0
                seconds = time.monotonic() - began
                logger.info("%s %d/%d %.0f s loss %.3f %s", stage.name, step + 1, stage.steps, seconds, mean, report)
            if (step + 1) % SAVE_EVERY == 0 or step + 1 == stage.steps:
                self.save(stage.name, step + 1)


def naming_loss(trainer: Trainer, namer: Namer, stage: Stage) -> Callable[[random.Random], tuple[Tensor, str]]:
    """The naming stage's step: fresh scenes, their loss, and the share of things named rightly."""

    def loss(rng: random.Random) -> tuple[Tensor, str]:
        scenes = [invent(rng, most=NAMING_THINGS) for _ in range(stage.batch)]
        scenes = [scene if not scene.is_held_out() else invent_for(rng, held_out=False) for scene in scenes]
        pixels = to_pixels([draw_training_picture(rng, scene) for scene in scenes])
        value, right = namer.loss(trainer.model, scenes, pixels)
        return value, f"named {right.float().mean():.3f}"

    return loss


def answering_loss(trainer: Trainer, packer: Packer, stage: Stage) -> Callable[[random.Random], tuple[Tensor, str]]:
    """The answering stage's step: fresh questions, their loss, and the share answered rightly of late."""

    def loss(rng: random.Random) -> tuple[Tensor, str]:
        batch = packer.batch(rng, stage.batch)
        value, right = answer_loss(trainer.model, batch)
        trainer.mixture.update(batch.kinds, right)
        return value, " ".join(f"{kind} {1 - error:.3f}" for kind, error in trainer.mixture.errors.items())

    return loss


def export(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the checkpoint in Hugging Face's format, weights in bfloat16."""
    build_processor(tokenizer).save_pretrained(out)
    weights = LlavaForConditionalGeneration(model.config)
    weights.load_state_dict(model.state_dict())
    weights.generation_config.do_sample = False  # a question has one right answer
    weights.bfloat16().save_pretrained(out)


def main() -> None:
    """Command line: both stages, then the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--naming-steps", type=int, default=1000)
    parser.add_argument("--answering-steps", type=int, default=7500)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="continue from the state saved in --out")
    args = parser.parse_args()

    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, args.seed)
    # The fused CPU kernel is slow in the backward pass where it has a mask.
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    trainer = Trainer(model, args.seed, args.out / "training_state.pt")
    naming = Stage("naming", args.naming_steps, rate=2e-3, batch=48, flat=0.5)
    answering = Stage("answering", args.answering_steps, rate=2e-3, batch=24, flat=0.6)
    done, first = trainer.resume() if args.resume else (naming.name, 0)
    if done == naming.name:
        trainer.run(naming, 1.0, naming_loss(trainer, Namer(tokenizer), naming), first)
        first = 0
    packer = Packer(tokenizer, trainer.mixture)
    trainer.run(answering, TOWER_SHARE, answering_loss(trainer, packer, answering), first)
    export(model, tokenizer, args.out)


if __name__ == "__main__":
    main()

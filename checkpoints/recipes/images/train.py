"""Trains the model that sees, after its tower: python -m checkpoints.recipes.images.train

Every step learns from questions about pictures, from captions of other pictures, which cost little,
and, so that nothing is forgotten, from text tasks: with text in every other step, a tenth of the
text answers was lost. Answers are short, so most canvases of them are too: a server makes such when
it is asked for a short answer.
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion, PreTrainedTokenizerFast

from checkpoints.recipes.batches import Batch
from checkpoints.recipes.forward import TrainingForward
from checkpoints.recipes.images.batches import (
    IMAGE_SHARES,
    LATER_IMAGE_SHARES,
    TextBatches,
    image_batch,
)
from checkpoints.recipes.images.patches import to_patches
from checkpoints.recipes.images.seeing import save_seeing
from checkpoints.recipes.images.steps import run_steps
from checkpoints.recipes.images.train_tower import CaptionTower, caption_loss, draw_pictures
from checkpoints.recipes.learning_rate import learning_rate_scale
from checkpoints.recipes.look_back import look_back_weights
from checkpoints.recipes.muon import MuonAdamW
from checkpoints.recipes.run_log import write_log
from checkpoints.recipes.tokenizer import build_seeing_tokenizer
from checkpoints.recipes.train import LOAD_BALANCE_WEIGHT, diffusion_loss

COPIES = 2  # noised canvases for each prefix
SHORT_CANVAS = 16  # tokens
SHORT_SHARE = 0.75  # of the steps


def make_step(
    model: DiffusionGemmaForBlockDiffusion,
    tokenizer: PreTrainedTokenizerFast,
    optimizer: MuonAdamW,
    args: argparse.Namespace,
) -> Callable[[random.Random, int], dict[str, float]]:
    """A step of the run, for `run_steps`."""
    forward = TrainingForward(model, compiled=args.compile)
    kept = [(view, view.detach().clone()) for view in look_back_weights(model)]
    captions = CaptionTower(model, tokenizer)
    canvas_length = model.config.canvas_length
    shares = LATER_IMAGE_SHARES if args.later else IMAGE_SHARES
    texts = TextBatches(
        tokenizer,
        seed=args.seed,
        canvas_length=canvas_length,
        copies=COPIES,
        tokens_per_batch=args.tokens_per_batch,
    )

    def learn(batch: Batch, images: Tensor | None = None) -> tuple[float, float]:
        forward.load_balance.clear()
        loss, right = diffusion_loss(forward, batch, COPIES, images=images)
        balance = torch.stack(forward.load_balance).mean()
        (loss + LOAD_BALANCE_WEIGHT * balance).backward()
        return loss.item(), right

    def one_step(rng: random.Random, step: int) -> dict[str, float]:
        is_short = rng.random() < SHORT_SHARE
        width = SHORT_CANVAS if is_short else canvas_length
        batch, pictures = image_batch(
            tokenizer, rng, rows=args.images, canvas_length=width, shares=shares
        )
        values, places = to_patches([picture.image for picture in pictures])
        seen = model.model.encoder.get_image_features(values, places, return_dict=True)
        image_loss, image_right = learn(batch, seen.pooler_output)
        logged = {"image_loss": image_loss, "image_right": image_right}
        text_loss, text_right = learn(texts.at(step))
        logged |= {"text_loss": text_loss, "text_right": text_right}
        # Its head for marks has learnt nothing.
        loss, written = caption_loss(captions, draw_pictures(rng, args.captions), mark_weight=0.0)
        loss.backward()
        scale = learning_rate_scale(
            step / args.steps, warmup=0.05, decay=0.6, head_start=1 / args.steps
        )
        optimizer.step(scale)
        with torch.no_grad():
            for view, value in kept:
                view.copy_(value)
        return logged | {"captions": written["captions"]}

    return one_step


def train(args: argparse.Namespace) -> None:
    tokenizer = build_seeing_tokenizer()
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(args.init_from, dtype=torch.float32)
    optimizer = MuonAdamW(
        model, muon_lr=args.muon_lr, adam_lr=args.adam_lr, weight_decay=args.weight_decay
    )
    entries = run_steps(
        model,
        optimizer,
        make_step(model, tokenizer, optimizer, args),
        steps=args.steps,
        seed=args.seed,
        state=args.state,
        log_every=args.log_every,
    )
    save_seeing(model, tokenizer, args.out)
    write_log(entries, args.out)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--init-from", type=Path, required=True, help="what train_tower.py made")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--state", type=Path, required=True, help="file to continue from")
    made.add_argument("--later", action="store_true", help="mostly what is learnt last")
    made.add_argument("--steps", type=int, default=900)
    made.add_argument("--images", type=int, default=16, help="questions about pictures a step")
    made.add_argument("--captions", type=int, default=32, help="pictures with captions a step")
    made.add_argument("--tokens-per-batch", type=int, default=3072, help="of text a step")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--muon-lr", type=float, default=1.5e-3)
    made.add_argument("--adam-lr", type=float, default=7e-4)
    made.add_argument("--weight-decay", type=float, default=0.05)
    made.add_argument("--log-every", type=int, default=20)
    made.add_argument("--compile", action="store_true", help="faster, after a minute or two")
    return made


def main() -> None:
    train(parser().parse_args())


if __name__ == "__main__":
    main()

"""Trains the vision tower alone, to write captions: the first part of the model that sees.

    python -m checkpoints.recipes.images.train_tower --out DIR

The last image tokens are to be what the text model would read in a caption of the picture: the
embeddings of its words, those of several words added. A head that is thrown away afterwards says
what each patch shows, so that the tower learns to see before it learns to write.
"""

import argparse
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion, PreTrainedTokenizerFast

from checkpoints.recipes.images.drawing import NUM_MARKS, Picture
from checkpoints.recipes.images.patches import num_tokens, to_patches
from checkpoints.recipes.images.seeing import save_seeing, start_seeing
from checkpoints.recipes.images.steps import run_steps
from checkpoints.recipes.images.tasks import IMAGE_TASKS, generate_image
from checkpoints.recipes.learning_rate import learning_rate_scale
from checkpoints.recipes.muon import MuonAdamW
from checkpoints.recipes.tokenizer import IMAGE_ID, build_seeing_tokenizer

BLANK = 10  # beside the ten digits
SHARPNESS = 0.25  # of the digit that a token stands for
BLANK_WEIGHT = 0.3
TASK_SHARES = {"image_digit": 1.0, "image_row": 2.0, "image_add": 1.5, "image_count": 1.5}


def draw_pictures(rng: random.Random, count: int) -> list[Picture]:
    """Pictures of the training side, of all tasks."""
    chosen = rng.choices(list(TASK_SHARES), list(TASK_SHARES.values()), k=count)
    return [generate_image(rng, task, held_out=False).picture for task in chosen]


class CaptionTower(nn.Module):
    """Tower and projection of a model that sees, with what their training needs."""

    def __init__(
        self, model: DiffusionGemmaForBlockDiffusion, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        super().__init__()
        self.tower = model.model.encoder.vision_tower
        self.projection = model.model.encoder.embed_vision
        width = model.config.vision_config.hidden_size
        self.marks = nn.Linear(width, NUM_MARKS)
        embedding = model.model.decoder.embed_tokens.weight.detach()
        self.register_buffer("embedding", embedding * embedding.shape[1] ** 0.5, persistent=False)
        digits = [tokenizer.convert_tokens_to_ids(str(digit)) for digit in range(10)]
        self.candidates = [*digits, IMAGE_ID]
        self.word_id = tokenizer.convert_tokens_to_ids
        self._seen: list[Tensor] = []
        # What patches show is read before the last layer, which writes.
        self.tower.encoder.layers[-2].register_forward_hook(
            lambda module, inputs, output: self._seen.append(output)
        )

    def forward(self, pictures: list[Picture]) -> tuple[Tensor, Tensor, Tensor]:
        """Gives the image tokens [N, H] of all pictures, one after the other, the logits of a digit
        for each [N, 11], and those of a mark for each patch [P, M]."""
        values, places = to_patches([picture.image for picture in pictures])
        self._seen.clear()
        states = self.tower(pixel_values=values, pixel_position_ids=places).last_hidden_state
        written = self.projection(states)
        scale = SHARPNESS / self.embedding.shape[1] ** 0.5
        digits = written @ self.embedding[self.candidates].T * scale
        return written, digits, self.marks(self._seen[-1][places[..., 0] >= 0])

    def targets(self, pictures: list[Picture]) -> tuple[Tensor, Tensor, Tensor]:
        """What `forward` should give: tokens, the class of each digit and of each mark."""
        written, digits, marks = [], [], []
        for picture in pictures:
            blank = num_tokens(picture.image) - len(picture.caption)
            ids = [[self.word_id(word) for word in words] for words in picture.caption]
            ids = [[IMAGE_ID]] * blank + ids
            written += [self.embedding[row].sum(0) / len(row) ** 0.5 for row in ids]
            digits += [BLANK] * blank + [int(words[-1]) for words in picture.caption]
            marks += picture.marks
        return torch.stack(written), torch.tensor(digits), torch.tensor(marks)


def caption_loss(
    module: CaptionTower, pictures: list[Picture], *, mark_weight: float = 0.5
) -> tuple[Tensor, dict[str, float]]:
    """Loss, and the shares of right digits, captions and marks."""
    written, digits, marks = module(pictures)
    target, digit_target, mark_target = module.targets(pictures)
    weight = torch.where(digit_target == BLANK, BLANK_WEIGHT, 1.0)
    weight = weight / weight.sum()
    loss = (F.cross_entropy(digits, digit_target, reduction="none") * weight).sum()
    distance = (written - target).square().sum(-1) / target.square().sum(-1)
    distance = (distance * weight).sum()
    mark_loss = F.cross_entropy(marks, mark_target)
    right = digits.argmax(-1) == digit_target
    counts = [num_tokens(picture.image) for picture in pictures]
    return loss + 0.5 * distance + mark_weight * mark_loss, {
        "loss": loss.item(),
        "distance": distance.item(),
        "right": right[digit_target != BLANK].float().mean().item(),
        "captions": sum(one.all().item() for one in right.split(counts)) / len(pictures),
        "marks": (marks.argmax(-1) == mark_target).float().mean().item(),
    }


@torch.no_grad()
def held_out_captions(module: CaptionTower, per_task: int = 200) -> dict[str, float]:
    """The share of held-out pictures of each task whose caption is right."""
    rng, shares = random.Random(0), {}
    for task in IMAGE_TASKS:
        examples = [generate_image(rng, task, held_out=True) for _ in range(per_task)]
        shares[task] = caption_loss(module, [e.picture for e in examples])[1]["captions"]
    return shares


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    tokenizer = build_seeing_tokenizer()
    model = start_seeing(len(tokenizer), args.init_from)
    module = CaptionTower(model, tokenizer)
    print(f"{sum(p.numel() for p in module.parameters()) / 1e6:.2f} M parameters", flush=True)
    optimizer = MuonAdamW(
        module, muon_lr=args.muon_lr, adam_lr=args.adam_lr, weight_decay=args.weight_decay
    )

    def one_step(rng: random.Random, step: int) -> dict[str, float]:
        loss, values = caption_loss(module, draw_pictures(rng, args.batch))
        loss.backward()
        progress = step / args.steps
        optimizer.step(learning_rate_scale(progress, warmup=0.02, decay=0.6, head_start=0.001))
        if (step + 1) % args.check_every == 0:
            print("held out:", held_out_captions(module), flush=True)
        return values

    run_steps(
        module,
        optimizer,
        one_step,
        steps=args.steps,
        seed=args.seed,
        state=args.state,
        log_every=args.log_every,
    )
    save_seeing(model, tokenizer, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--init-from", type=Path, required=True, help="text model to start from")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True, help="file to continue from")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=32, help="pictures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--muon-lr", type=float, default=1e-2)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--check-every", type=int, default=250)
    train(parser.parse_args())


if __name__ == "__main__":
    main()

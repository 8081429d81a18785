"""What the training of the model that calls functions starts from."""

import random

import torch
from transformers import DiffusionGemmaForBlockDiffusion, PreTrainedTokenizerFast

from checkpoints.recipes.batches import draw_training
from checkpoints.recipes.calls.tasks import CALL_TASKS, generate_call
from checkpoints.recipes.calls.tokenizer import CALL_PIECES, CALL_TOKENS
from checkpoints.recipes.tasks import Example
from checkpoints.recipes.words import FUNCTION_WORDS


@torch.no_grad()
def start_rows(model: DiffusionGemmaForBlockDiffusion, tokenizer: PreTrainedTokenizerFast) -> None:
    """Random embeddings for the new tokens, as large as those of known words: as unused ones they
    have only ever been noise, and are much alike."""
    embedding = model.model.decoder.embed_tokens.weight
    new, known = (
        torch.tensor([tokenizer.encode(text, add_special_tokens=False)[0] for text in texts])
        for texts in ([*CALL_TOKENS, *CALL_PIECES], FUNCTION_WORDS)
    )
    rows = embedding[known]
    embedding[new] = rows.mean(0) + torch.randn(len(new), rows.shape[1]) * rows.std(0)


def draw_call_or_text(rng: random.Random, task: str) -> Example:
    if task in CALL_TASKS:
        return generate_call(rng, task, held_out=False)
    return draw_training(rng, task)

"""Small masked models of each family's layout, trained on a language that can be judged.

The language has words of three to nine tokens, each with four words that may follow it. Inside a
word all is certain, behind it little, as in text. A model is trained as its family is published:
Nemotron causally and to fill in a block behind causal tokens; the others to fill in a block that
sees whole blocks, Fast-dLLM v2 from the row before. LLaDA2 also sees wrong tokens, and says what
belongs in their place, so that its edits have something to go by. SDAR and LLaDA2 learn blocks of
one token, too, which their verified drafts are decoded in.
"""

import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from attention_kernels.masks import visible
from tests.engine.llada2 import LLaDA2
from tests.engine.masked import Reference, make_checkpoint, published_weights
from vllm_dllm.config.architectures import FAMILIES

BLOCK, LENGTH = 32, 96
BATCH = {"LLaDA2MoeModelLM": 8}  # 24 of other families: its layers here are slow
TOKENS = range(10, 90)
SHARES = (0.6, 0.2, 0.15, 0.05)
"""Of the words that may follow a word."""
WRONG = 0.15
"""Share of a block's known tokens that LLaDA2 sees replaced by others."""
Language = tuple[list[list[int]], list[list[int]]]  # words, and the words that may follow each


def make_language(rng: random.Random, num_words: int = 16) -> Language:
    words = [rng.choices(TOKENS, k=rng.randint(3, 9)) for _ in range(num_words)]
    return words, [rng.sample(range(num_words), len(SHARES)) for _ in words]


def write(language: Language, length: int, rng: random.Random) -> list[int]:
    """Returns `length` tokens of a text that begins somewhere in a word."""
    words, follow = language
    word = rng.randrange(len(words))
    tokens: list[int] = []
    while len(tokens) < length + 9:
        tokens += words[word]
        word = rng.choices(follow[word], SHARES)[0]
    first = rng.randrange(9)
    return tokens[first : first + length]


def count_breaks(language: Language, tokens: list[int]) -> int:
    """Tokens that nothing explains: no word goes on with them, and none that may follow begins."""
    words, follow = language
    anywhere = {(w, i) for w, word in enumerate(words) for i in range(len(word))}
    places, found = anywhere, 0
    for token in tokens:
        fitting = {(w, i) for w, i in places if words[w][i] == token}
        if not fitting:
            found, fitting = found + 1, {(w, i) for w, i in anywhere if words[w][i] == token}
        places = {
            place
            for w, i in fitting
            for place in ([(w, i + 1)] if i + 1 < len(words[w]) else [(n, 0) for n in follow[w]])
        }
    return found


def trained_checkpoint(folder: Path, architecture: str, language: Language, num_steps: int) -> Path:
    """Makes a checkpoint of this family, blocks of 32, and trains it. One that is there is kept."""
    path = folder / architecture
    if (path / "trained").exists():
        return path
    path, plain = make_checkpoint(path, BLOCK, architecture)
    train(plain, architecture, language, num_steps)
    weights = published_weights(plain.model, architecture)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    (path / "trained").touch()
    return path


def train(plain: Reference, architecture: str, language: Language, num_steps: int) -> None:
    rng, model, count = random.Random(0), plain.model.train(), BATCH.get(architecture, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, num_steps, pct_start=0.05)
    for step in range(num_steps):
        clean = torch.tensor([write(language, LENGTH, rng) for _ in range(count)])
        loss = loss_of(plain, architecture, clean, rng)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == num_steps - 1:
            print(f"{architecture}, step {step}: loss {loss.item():.3f}", flush=True)
    model.eval()


def loss_of(
    plain: Reference, architecture: str, clean: torch.Tensor, rng: random.Random
) -> torch.Tensor:
    """The mean cross entropy of one block with masks, and of what else the family is trained on, of
    texts [batch, LENGTH]."""
    family = FAMILIES[architecture]
    if family.allows_blocks_in_flight and rng.random() < 0.5:
        return loss_of_single_tokens(plain, clean, rng)
    start = rng.randint(2, LENGTH - BLOCK) if family.is_causal else rng.randrange(0, LENGTH, BLOCK)
    end = start + BLOCK
    share = torch.tensor([rng.choice((1.0, rng.random())) for _ in clean])
    hidden = torch.rand(len(clean), BLOCK) < share[:, None]
    if family.knows_first_token or start == 0:
        hidden[:, 0] = False  # known before the first step, or a prompt's
    block = clean[:, start:end].masked_fill(hidden, plain.mask_id)
    asked = hidden
    if architecture == "LLaDA2MoeModelLM":
        wrong = ~hidden & (torch.rand(hidden.shape) < WRONG)
        others = torch.randint(TOKENS.start, TOKENS.stop, hidden.shape)
        block, asked = torch.where(wrong, others, block), torch.ones_like(hidden)
    tokens = torch.cat((clean[:, :start], block), dim=1)
    position = torch.arange(end)
    if family.is_causal:  # the block's rows see all
        seen = (position[:, None] >= position) | (position[:, None] >= start)
    else:
        seen = position[:, None] // BLOCK >= position // BLOCK
    logits = logits_of(plain, tokens, seen, position)
    target = torch.where(asked, clean[:, start:end], -100)
    if family.is_shifted:
        rows = logits[:, start : end - 1]
        loss = F.cross_entropy(rows.flatten(0, 1), target[:, 1:].flatten())
        if start > 0:  # a finished block's last row
            loss = loss + F.cross_entropy(logits[:, start - 1], clean[:, start])
        return loss
    loss = F.cross_entropy(logits[:, start:end].flatten(0, 1), target.flatten())
    if family.is_causal:
        ahead = clean[:, 1 : start + 1].flatten()
        loss = loss + F.cross_entropy(logits[:, :start].flatten(0, 1), ahead)
    return loss


def loss_of_single_tokens(
    plain: Reference, clean: torch.Tensor, rng: random.Random
) -> torch.Tensor:
    """The mean cross entropy of one block in blocks of one token: masks in a second copy of it, as
    where drafts are verified."""
    start = rng.randrange(0, LENGTH, BLOCK)
    end = start + BLOCK
    masks = torch.full((len(clean), BLOCK), plain.mask_id)
    place = torch.arange(end + BLOCK)
    by_blocks = place[:start, None] // BLOCK >= place // BLOCK
    verifying = visible(place[start:, None], place, start, -BLOCK, window_left=-1)
    position = torch.where(place < end, place, place - BLOCK)
    tokens, seen = torch.cat((clean[:, :end], masks), dim=1), torch.cat((by_blocks, verifying))
    logits = logits_of(plain, tokens, seen, position)[:, end:]
    asked = logits if start > 0 else logits[:, 1:]  # nothing foretells a text's first token
    return F.cross_entropy(asked.flatten(0, 1), clean[:, end - asked.shape[1] : end].flatten())


def logits_of(
    plain: Reference,
    tokens: torch.Tensor,  # [batch, T]
    seen: torch.Tensor,  # [T, T] bool, whether a row sees a key
    position: torch.Tensor,  # [T]
) -> torch.Tensor:
    """Returns [batch, T, V]."""
    batch, length = tokens.shape
    if isinstance(plain.model, LLaDA2):  # takes one sequence
        apart = torch.block_diag(*[seen] * batch)
        logits = plain.model(tokens.flatten(), apart.bool(), position.repeat(batch))
        return logits.unflatten(0, (batch, length))
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    return plain.model(
        input_ids=tokens,
        attention_mask=mask.expand(batch, -1, -1, -1),
        position_ids=position[None],
    ).logits

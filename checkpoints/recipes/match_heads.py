"""Gives a model the attention heads a look-up needs, which a short training does not find.

    python -m checkpoints.recipes.match_heads IN OUT

To look a key up, each value must know the key before it (a head that looks two tokens back), and
each answer must find the value of the document whose key is its own (a head that matches the two).
Neither helps without the other, so a small model guesses among the document's values for thousands
of steps. So one head of each kind is set by hand, in the manner of mimetic initialization (Trockman
and Kolter, arXiv:2305.09828), and training only has to learn to use them.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion

from checkpoints.recipes.batches import Batch, training_batches
from checkpoints.recipes.checkpoint import save_bf16_copy
from checkpoints.recipes.forward import TrainingForward
from checkpoints.recipes.look_back import constant_readout, install_look_back
from checkpoints.recipes.run_log import earlier_log, write_log
from checkpoints.recipes.task_shares import TASK_SHARES
from checkpoints.recipes.tokenizer import build_tokenizer
from checkpoints.recipes.words import NAMES

KEY_OFFSET = 2  # a value's key is this many tokens before it: key, '": "' or ': ', value
MATCH_CHANNELS = 24  # the last ones of the matching head, which rotary embedding leaves alone


@torch.no_grad()
def install_match(
    layer: nn.Module,
    values: Tensor,  # [N, H], what enters the layer's attention at values of documents
    answers: Tensor,  # [N, H], the same at the matching answers, on a canvas
    others: Tensor,  # [M, H], at other tokens of the prompts
) -> None:
    """Overwrites the last channels of a full-attention layer's key head and its last query head:
    they match what values and answers share (canonical correlation), which is their key."""
    k = MATCH_CHANNELS
    value_mean, answer_mean = values.mean(0), answers.mean(0)
    x, y = values - value_mean, answers - answer_mean
    # Other tokens count when inputs are whitened, or they would drown out the values.
    whiten_x = _inverse_root(torch.cat((x, others - others.mean(0))))
    whiten_y = _inverse_root(y)
    u, correlation, vt = torch.linalg.svd(whiten_x @ (x.T @ y / len(x)) @ whiten_y)
    constant = constant_readout(torch.cat((values, answers, others)))
    strength = correlation[:k].sqrt()
    keys, queries = whiten_x @ u[:, :k], whiten_y @ vt.T[:, :k]
    keys = (keys - torch.outer(constant, value_mean @ keys)) * strength
    queries = (queries - torch.outer(constant, answer_mean @ queries)) * strength

    attention = layer.self_attn
    D = attention.head_dim
    key_weight, query_weight = attention.k_proj.weight, attention.q_proj.weight
    scale = 1.2 * (values @ key_weight.T).std() / (values @ keys).std()
    key_norm, query_norm = attention.k_norm.weight[-k:], attention.q_norm.weight[-k:]
    mean_norm = attention.k_norm.weight.mean()
    key_weight[D - k : D] = keys.T * scale * mean_norm / key_norm[:, None]
    query_weight[-D:] = 0.0
    query_weight[-k:] = queries.T * mean_norm / query_norm[:, None]


def _inverse_root(rows: Tensor) -> Tensor:
    """[H, H] that whitens centred rows [N, H]."""
    covariance = rows.T @ rows / len(rows)
    ridge = 1e-2 * covariance.diagonal().mean()
    eigenvalues, vectors = torch.linalg.eigh(covariance + ridge * torch.eye(len(covariance)))
    return vectors @ torch.diag(eigenvalues.rsqrt()) @ vectors.T


class _Recorder(TrainingForward):
    """Keeps what entered the attention of one layer in the latest pass."""

    def __init__(self, model: DiffusionGemmaForBlockDiffusion, layer: int) -> None:
        super().__init__(model)
        self._recorded = self.layers[layer]
        self.inputs = torch.empty(0)

    def _qkv(
        self, layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if layer is self._recorded:
            self.inputs = self.ops.rms_norm(x, layer.input_layernorm.weight)
        return super()._qkv(layer, x, cos, sin)


@torch.no_grad()
def first_layer_inputs(
    model: DiffusionGemmaForBlockDiffusion, batches: Iterator[Batch], num_batches: int = 6
) -> Tensor:
    """[N, H] of prompts and of noised canvases, with and without self-conditioning."""
    forward = _Recorder(model, 0)
    rows = []
    for _ in range(num_batches):
        batch = next(batches)
        prefix = forward.encode(batch.prefix, batch.is_token)
        rows.append(forward.inputs.flatten(0, 1))
        noise = torch.randint_like(batch.target, model.config.text_config.vocab_size)
        half = torch.rand(batch.target.shape) < 0.5
        canvas = torch.where(half, noise, batch.target)[:, None]
        logits = forward.decode(canvas, prefix, None)
        rows.append(forward.inputs.flatten(0, 1))
        forward.decode(canvas, prefix, logits / 0.6)
        rows.append(forward.inputs.flatten(0, 1))
    return torch.cat(rows)


@torch.no_grad()
def matching_rows(
    model: DiffusionGemmaForBlockDiffusion,
    layer: int,
    batches: Iterator[Batch],
    value_tokens: set[int],
    num_batches: int = 60,
) -> tuple[Tensor, Tensor, Tensor]:
    """(values, answers, others) for `install_match`, from look-ups whose keys are on the canvas."""
    forward = _Recorder(model, layer)
    wanted = torch.tensor(sorted(value_tokens))
    values, answers, others = [], [], []
    for i in range(num_batches):
        batch = next(batches)
        prefix = forward.encode(batch.prefix, batch.is_token)
        document = forward.inputs
        is_answer = torch.isin(batch.target, wanted)
        noise = torch.randint_like(batch.target, model.config.text_config.vocab_size)
        canvas = torch.where(is_answer, noise, batch.target)[:, None]
        previous = forward.decode(canvas, prefix, None) / 0.6 if i % 2 else None
        forward.decode(canvas, prefix, previous)
        is_value = torch.isin(batch.prefix, wanted)
        others.append(document[~is_value & batch.is_token][::3])
        for row in range(len(batch.target)):
            # A key occurs once before a value; later occurrences are in the question.
            position = {
                int(batch.prefix[row, j - KEY_OFFSET]): j
                for j in is_value[row].nonzero().flatten().tolist()
            }
            for j in is_answer[row].nonzero().flatten().tolist():
                key = int(batch.target[row, j - KEY_OFFSET])
                values.append(document[row, position[key]])
                answers.append(forward.inputs[row, j])
    return torch.stack(values), torch.stack(answers), torch.cat(others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(args.checkpoint, dtype=torch.float32)

    def batches(shares: dict[str, float]) -> Iterator[Batch]:
        return training_batches(
            tokenizer,
            shares,
            seed=args.seed,
            canvas_length=model.config.canvas_length,
            canvases_per_prefix=2,
            tokens_per_batch=3072,
        )

    install_look_back(model, first_layer_inputs(model, batches(TASK_SHARES)))
    kinds = model.config.text_config.layer_types
    layer = kinds.index("full_attention")
    names = {tokenizer.encode(name, add_special_tokens=False)[0] for name in NAMES}
    rows = matching_rows(model, layer, batches({"lookup_dense": 1.0}), names)
    install_match(model.model.decoder.layers[layer], *rows)
    save_bf16_copy(model, tokenizer, args.out)
    write_log(earlier_log(args.checkpoint), args.out)


if __name__ == "__main__":
    main()

"""Trains a width predictor: cross-entropy against the best block size of each prompt."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dllm.drafters.blockpilot import BlockPilot, PredictorConfig
from vllm_dllm.tools.drafter.measured import Measured

EPOCHS = 60
BATCH_SIZE = 64
LEARNING_RATES = {"full": 1e-4, "small": 3e-3}
WEIGHT_DECAY = 0.01
VALIDATION_SHARE = 0.15  # of the training prompts, to choose an epoch


@dataclass(frozen=True)
class Trained:
    predictor: BlockPilot
    epoch: int
    """The epoch whose weights are kept, for its lowest loss on the validation prompts."""
    losses: list[tuple[float, float]]
    """The losses of each epoch, in nats: training, validation."""


def train_predictor(data: Measured, config: PredictorConfig, seed: int) -> Trained:
    """Trains on the CPU, in seconds for a few thousand prompts; a seed gives the same weights."""
    torch.manual_seed(seed)
    predictor = BlockPilot(config)
    order = torch.randperm(len(data))
    num_validation = max(1, round(VALIDATION_SHARE * len(data)))
    validation, training = data[order[:num_validation]], data[order[num_validation:]]
    predictor.standardise(training.logits)
    fixed = data.best_fixed
    inputs, labels = predictor.inputs(training.logits), training.labels(fixed)
    seen, wanted = predictor.inputs(validation.logits), validation.labels(fixed)
    optimizer = torch.optim.AdamW(
        predictor.parameters(), lr=LEARNING_RATES[config.variant], weight_decay=WEIGHT_DECAY
    )
    losses: list[tuple[float, float]] = []
    best: dict[str, Tensor] = {}
    for _ in range(EPOCHS):
        predictor.train()
        total = 0.0
        for rows in torch.randperm(len(labels)).split(BATCH_SIZE):
            loss = F.cross_entropy(predictor(inputs[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        predictor.eval()
        with torch.no_grad():
            validation_loss = F.cross_entropy(predictor(seen), wanted).item()
        if not losses or validation_loss < min(loss for _, loss in losses):
            best = {name: w.clone() for name, w in predictor.state_dict().items()}
        losses.append((total / len(labels), validation_loss))
    predictor.load_state_dict(best)
    epoch = min(range(EPOCHS), key=lambda i: losses[i][1])
    return Trained(predictor, epoch, losses)

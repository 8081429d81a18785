"""Trains a width predictor: cross-entropy against the best block size of each prompt."""

import copy
import math

import torch
import torch.nn.functional as F

from vllm_dllm.drafters.blockpilot import BlockPilot, PredictorConfig
from vllm_dllm.tools.drafter.measured import Measured

EPOCHS = 60
BATCH_SIZE = 64
LEARNING_RATES = {"full": 1e-4, "small": 3e-3}
WEIGHT_DECAY = 0.01
VALIDATION_SHARE = 0.15  # of the training prompts, to choose an epoch


def train_predictor(data: Measured, config: PredictorConfig, seed: int) -> BlockPilot:
    """Trains on the CPU, in seconds for a few thousand prompts; a seed gives the same weights.
    Those of the epoch with the lowest loss on the validation prompts are kept."""
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
    lowest, best = math.inf, predictor.state_dict()
    for _ in range(EPOCHS):
        predictor.train()
        for rows in torch.randperm(len(labels)).split(BATCH_SIZE):
            loss = F.cross_entropy(predictor(inputs[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        predictor.eval()
        with torch.no_grad():
            validation_loss = F.cross_entropy(predictor(seen), wanted).item()
        if validation_loss < lowest:
            lowest, best = validation_loss, copy.deepcopy(predictor.state_dict())
    predictor.load_state_dict(best)
    return predictor

"""What the page is told of the model that it asks."""

from typing import Any

from vllm.config import ModelConfig

from vllm_dllm.config.architectures import MASKED_MODELS
from vllm_dllm.requests.options import ACCEPTANCE_RULES

OUR_TASKS = (
    "Sort: o r n i a z l v",
    "Count from 34 to 59.",
    "Reverse: sand rose seed cherry eagle fox bridge cloud",
)
ANYTHING = (
    "Write a poem of four lines about the sea.",
    "Why is the sky blue? Explain it to a child.",
    "Write a Python function that tells whether a word is a palindrome.",
)
_SMALL_VOCABULARY = 1024  # those of the shipped checkpoints have half of it


def about(config: ModelConfig) -> dict[str, Any]:
    """Questions that the model can answer, and the rules of acceptance that it knows."""
    is_masked = not MASKED_MODELS.keys().isdisjoint(config.architectures)
    return {
        "examples": OUR_TASKS if config.get_vocab_size() < _SMALL_VOCABULARY else ANYTHING,
        "acceptance": [rule for rule in ACCEPTANCE_RULES if is_masked or rule != "in_order"],
    }

"""Private names around LoRA adapters."""

from typing import Any

from torch import nn


def leave_vocabulary_to_base(runner: Any) -> None:
    """Adapters of a runner that is about to load a target with a drafter change neither embeddings
    nor LM head: vLLM expects one row of logits of a request, and a request whose drafts are
    verified has several. Adapters that do are refused when they are loaded."""
    stock_load_lora_model = runner.load_lora_model

    def load_lora_model(model: nn.Module, *args: Any) -> nn.Module:
        if runner.speculative_config is not None:
            model.embedding_modules = {}
        return stock_load_lora_model(model, *args)

    runner.load_lora_model = load_lora_model

"""What a drafter takes from its target: states of chosen layers, embedding, LM head.

The states are the outputs of the chosen decoder layers, caught by hooks on the running model.
`output_hidden_states` would not do: its last entry has been through the final norm.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from vllm_dllm.errors import InputError


class Target:
    """A frozen causal language model of transformers."""

    def __init__(self, model: PreTrainedModel):
        self.model = model.eval().requires_grad_(False)
        self.config = model.config.get_text_config()
        self.device = model.device

    @torch.no_grad()
    def states(
        self,
        tokens: Tensor,  # [B, T] int64, right-padded, so that causal attention needs no mask
        layer_ids: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """[B, T, layers · H] outputs of the layers side by side, and logits [B, T, V]; both in the
        model's dtype. Values at padded positions mean nothing."""
        caught: dict[int, Tensor] = {}

        def catch(layer_id: int, output: Tensor | tuple[Tensor, ...]) -> None:
            caught[layer_id] = output[0] if isinstance(output, tuple) else output

        layers = self.model.get_decoder().layers
        hooks = [
            layers[i].register_forward_hook(lambda _, __, output, i=i: catch(i, output))
            for i in layer_ids
        ]
        try:
            logits = self.model(input_ids=tokens, use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([caught[i] for i in layer_ids], dim=-1), logits

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the table as they are: vLLM shares the table with the drafter, not a scale."""
        return F.embedding(tokens, self.model.get_input_embeddings().weight)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden)


def load_target(path: Path, device: str) -> Target:
    """The target in its own dtype on a GPU, in float32 on a CPU, where bfloat16 is slow."""
    dtype = torch.float32 if device == "cpu" else "auto"
    return Target(AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device))


def target_text_config(path: Path) -> Any:
    if not (path / "config.json").is_file():
        raise InputError(f"{path} holds no model: expected a folder with config.json")
    return AutoConfig.from_pretrained(path).get_text_config()


def check_fit(drafter: Qwen3Config, target: Any) -> None:
    """Raises InputError when the drafter was made for another target."""
    num_layers = target.num_hidden_layers
    layer_ids = drafter.dflash_config["target_layer_ids"]
    mask_token_id = drafter.dflash_config["mask_token_id"]
    if any(not 0 <= i < num_layers for i in layer_ids):
        raise InputError(
            f"the drafter reads target layers {layer_ids}, the target has layers 0 to "
            f"{num_layers - 1}"
        )
    if drafter.num_target_layers != num_layers:
        raise InputError(
            f"the drafter is for a target of {drafter.num_target_layers} layers, the target has "
            f"{num_layers}"
        )
    if drafter.hidden_size != target.hidden_size:
        raise InputError(
            f"the drafter's hidden size is {drafter.hidden_size}, the target's is "
            f"{target.hidden_size}: it reuses the target's embedding and must be as wide"
        )
    if drafter.vocab_size != target.vocab_size:
        raise InputError(
            f"the drafter's vocabulary has {drafter.vocab_size} tokens, the target's "
            f"{target.vocab_size}"
        )
    if not 0 <= mask_token_id < target.vocab_size:
        raise InputError(
            f"the drafter's mask token is {mask_token_id}, the target's vocabulary ends at "
            f"{target.vocab_size - 1}"
        )

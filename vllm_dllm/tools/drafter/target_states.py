"""The target of a drafter, with what the drafter takes from it: hidden states of chosen layers, the
embedding, and the LM head."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from vllm_dllm.drafters.layout import DrafterMismatch, check_drafter
from vllm_dllm.errors import InputError


class Target:
    """A frozen causal language model of transformers. Its weights get no gradients."""

    def __init__(self, model: PreTrainedModel):
        self.model = model.eval().requires_grad_(False)
        self.config = model.config.get_text_config()
        self.device = model.device

    @torch.no_grad()
    def states(
        self,
        tokens: Tensor,  # [B, T] int64, right-padded, so that causal attention needs no mask
        layer_ids: Sequence[int],  # from 0
    ) -> tuple[Tensor, Tensor]:
        """Returns the outputs [B, T, layers · H] of the layers, side by side, and the logits [B, T,
        V], both in the model's dtype. Values at padded positions mean nothing."""
        # By hooks: the last entry of `output_hidden_states` has been through the final norm.
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
        """Returns the embeddings [..., H] of tokens [...] int64. They are not scaled: vLLM shares
        the table with the drafter, but not a scale."""
        return F.embedding(tokens, self.model.get_input_embeddings().weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the LM head's logits [..., V] for hidden states [..., H]."""
        return self.model.get_output_embeddings()(hidden)


def load_target(path: Path, device: str) -> Target:
    """Returns the target on a device: on a GPU in its own dtype, on a CPU in fp32, since bf16 is
    slow there."""
    dtype = torch.float32 if device == "cpu" else "auto"
    return Target(AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device))


def target_text_config(path: Path) -> Any:
    """Returns the text part of a model's config. Raises InputError if the folder has no
    config.json."""
    if not (path / "config.json").is_file():
        raise InputError(f"{path} holds no model: expected a folder with config.json")
    return AutoConfig.from_pretrained(path).get_text_config()


def check_fit(drafter: Any, target: Any, names: tuple[str, str] = ("given", "given")) -> None:
    """Raises InputError if the drafter's config does not fit the target's. `names` are those of
    drafter and target in the message."""
    try:
        check_drafter(drafter.to_dict(), target.to_dict(), *names)
    except DrafterMismatch as error:
        raise InputError(str(error)) from error

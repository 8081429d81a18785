"""The DFlash drafter in plain PyTorch, and its target. It defines what is right, and is what
training trains.

A drafter has no vocabulary of its own. A block is the embedding of [anchor, mask, mask, …] by the
target's table. The anchor is the token sampled last. The mask at position p guesses the token at p,
through the target's LM head.

Every layer attends, without a causal mask, to the block and the context. The context is every token
before the anchor: their target states are known. It is not run through the layers: keys and values
of each layer are projected straight from the target's states. So the layers are Qwen3's, with a KV
cache that is filled from these states.

The numbers are those of vLLM 0.32's `qwen3_dflash.py`. The paper is "DFlash: Block Diffusion for
Flash Speculative Decoding" (arXiv:2602.06036).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from vllm_dllm.drafters.layout import ANCHOR_KEYS
from vllm_dllm.errors import InputError
from vllm_dllm.quantization.weight_files import WEIGHTS_FILE, load_state, save_tensors
from vllm_dllm.tools.inputs import read_config

ARCHITECTURE = "DFlashDraftModel"
OPTIONS = ("mask_token_id", "target_layer_ids")  # of dflash_config
OTHER_LAYERS = (
    *("causal", "is_causal", "use_swa", "attention_sink_bias", "attention_value_scale"),
    *ANCHOR_KEYS,
)
"""Keys of dflash_config, or beside it, of drafters that vLLM serves and that compute otherwise."""
FROM_TARGET = (
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rope_parameters"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)

ContextKV = list[tuple[Tensor, Tensor]]
"""Each layer's keys, with norm and rotation, and values: [B, kv_heads, C, head_dim] each, for C
tokens of context."""


def make_drafter_config(
    target: Any,  # the target's text config
    *,
    num_layers: int,
    target_layer_ids: Sequence[int],  # from 0; the outputs of these layers are the context
    mask_token_id: int,
    block_size: int,  # slots, the anchor included
) -> Qwen3Config:
    """Returns the config of a new drafter, as wide as its target, in the layout of the published
    drafters (z-lab/…-DFlash). Where the target's layers differ, they are like its first, and rotate
    by the base of those that see everything."""
    layer = target.per_layer_config[0]
    settings = {name: getattr(layer, name) for name in FROM_TARGET}
    if (everything := target.rope_parameters.get("full_attention")) is not None:
        base = everything["rope_theta"]
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": base}
    return Qwen3Config(
        architectures=[ARCHITECTURE],
        num_hidden_layers=num_layers,
        layer_types=["full_attention"] * num_layers,
        tie_word_embeddings=False,
        use_cache=False,
        block_size=block_size,
        num_target_layers=target.num_hidden_layers,
        dflash_config={"mask_token_id": mask_token_id, "target_layer_ids": list(target_layer_ids)},
        **settings,
    )


class DFlashDrafter(nn.Module):
    """The whole drafter. Its parameters have the names that they have in the published
    checkpoints."""

    def __init__(self, config: Qwen3Config):
        """Makes a drafter with random weights. Sets the kind of attention in `config`."""
        super().__init__()
        config._attn_implementation = "sdpa"
        self.config = config
        self.mask_token_id: int = config.dflash_config["mask_token_id"]
        self.target_layer_ids: list[int] = config.dflash_config["target_layer_ids"]
        states_size = len(self.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(states_size, config.hidden_size, bias=False)
        self.hidden_norm = qwen3.Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(
            qwen3.Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = qwen3.Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = qwen3.Qwen3RotaryEmbedding(config)  # holds no weights

    def context_kv(
        self,
        states: Tensor,  # [B, C, layers · H], outputs of the target's layers side by side
        positions: Tensor,  # [B, C] int64
    ) -> ContextKV:
        """Returns each layer's keys and values of the C tokens of context."""
        context = self.hidden_norm(self.fc(states))
        rotation = self.rotary(context, positions)
        keys_values = []
        for layer in self.layers:
            attention = layer.self_attn
            heads = (*context.shape[:-1], -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(context).view(heads)).transpose(1, 2)
            values = attention.v_proj(context).view(heads).transpose(1, 2)
            keys_values.append((qwen3.apply_rotary_pos_emb(keys, keys, *rotation)[1], values))
        return keys_values

    def forward(
        self,
        embeddings: Tensor,  # [B, Q, H] of blocks, by the target's table
        positions: Tensor,  # [B, Q] int64
        context: ContextKV,
        visible: Tensor | None = None,  # [B, Q, C + Q] bool, True: the query sees the key
    ) -> Tensor:
        """Returns hidden states [B, Q, H] for the target's LM head. Without `visible` all Q queries
        are one block, which sees the whole context and itself."""
        rotation = self.rotary(embeddings, positions)
        cache = DynamicCache(context)
        hidden = embeddings
        for layer in self.layers:
            hidden = layer(
                hidden,
                attention_mask=None if visible is None else visible[:, None],
                past_key_values=cache,
                position_embeddings=rotation,
                is_causal=False,
            )
        return self.norm(hidden)


def save_drafter(drafter: DFlashDrafter, path: Path, dtype: torch.dtype) -> None:
    """Writes config.json and the weights as `dtype` into the folder `path`, and makes the folder if
    needed. Changes the dtype in the drafter's config."""
    path.mkdir(parents=True, exist_ok=True)
    drafter.config.dtype = dtype
    drafter.config.save_pretrained(path)
    weights = {name: w.detach().to(dtype) for name, w in drafter.state_dict().items()}
    save_tensors(weights, path / WEIGHTS_FILE)


def load_drafter(path: Path) -> DFlashDrafter:
    """Returns a drafter from a folder in the published layout: full attention, one weights file. It
    is in eval mode and fp32, on the CPU. Raises InputError if the folder has no such drafter."""
    config: Any = read_config(path)
    options = getattr(config, "dflash_config", None) or {}
    if config.architectures != [ARCHITECTURE] or not options.keys() >= set(OPTIONS):
        raise InputError(
            f"{path / 'config.json'}: expected architectures [{ARCHITECTURE!r}] and a "
            f"dflash_config with {' and '.join(OPTIONS)}, as z-lab publishes drafters, got "
            f"{config.architectures} and {options}"
        )
    # Newer drafters of z-lab's have it inside.
    config.block_size = options.get("block_size") or getattr(config, "block_size", None)
    if config.block_size is None:
        raise InputError(
            f"{path / 'config.json'}: expected block_size, the slots of a block with its anchor, "
            f"there or in its dflash_config. Add it."
        )
    other = [key for key in OTHER_LAYERS if options.get(key) or getattr(config, key, None)]
    if set(config.layer_types) != {"full_attention"}:
        other.append("layer_types")
    if other:
        raise InputError(
            f"{path / 'config.json'}: expected a drafter whose layers see the whole context and "
            f"block, and whose masks alone are predictions, got {', '.join(other)}. It can be "
            f"served, but not trained or measured here."
        )
    drafter = DFlashDrafter(config)
    load_state(drafter, path)
    return drafter.float().eval()


class Target:
    """A frozen causal language model of transformers. Its weights get no gradients."""

    def __init__(self, model: PreTrainedModel):
        """Sets `model` to eval mode and freezes it, in place."""
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
        """Returns the embeddings [..., H] of tokens [...] int64, scaled if the target's are."""
        return self.model.get_input_embeddings()(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the LM head's logits [..., V] for hidden states [..., H]."""
        return self.model.get_output_embeddings()(hidden)


def load_target(path: Path, device: str) -> Target:
    """Returns the target on a device: on a GPU in its own dtype, on a CPU in fp32, since bf16 is
    slow there. Raises InputError if there is no such device, or transformers has no such causal
    language model."""
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise InputError(f"--device must be cpu or cuda, got {device}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(f"--device {device} needs a GPU, and PyTorch finds none: use cpu")
    dtype = torch.float32 if device == "cpu" else "auto"
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except ValueError as error:  # its first line says which class of configuration it has
        raise InputError(
            f"{path} cannot be a target: expected an autoregressive language model that "
            f"transformers knows, got: {str(error).splitlines()[0]}"
        ) from error
    except SafetensorError as error:
        raise InputError(
            f"{path} has a weight file that is not whole ({error}): copy or download it again"
        ) from error
    return Target(model.to(device))

"""SDAR's published loop (`generate.py` of github.com/JetAstra/SDAR), which is LLaDA2.0's too, on
random checkpoints: the definition of right for masked models.

Each forward computes the whole sequence under a mask, so there is no cache to be wrong about.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    Ministral3Config,
    Ministral3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from checkpoints.recipes.tokenizer import build_tokenizer
from tests.engine.llada2 import LLaDA2
from tests.unit.denoise.test_masked import published
from vllm_dllm.config.architectures import FAMILIES
from vllm_dllm.denoise import noise
from vllm_dllm.denoise.impossible import MASKED_LOGIT
from vllm_dllm.denoise.row_stats import sample_by_inversion

COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
QWEN3 = COMMON | {"rope_theta": 1000000, "attention_bias": False}
CONFIGS: dict[str, dict[str, Any]] = {  # as published, but for the sizes
    "SDARForCausalLM": QWEN3
    | {"model_type": "sdar", "fuse_cross_entropy": True, "auto_map": {"AutoConfig": "none.None"}},
    "SDARMoeForCausalLM": QWEN3
    | {
        "model_type": "sdar_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "LLaDA2MoeModelLM": COMMON
    | {
        "model_type": "llada2_moe",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "partial_rotary_factor": 0.5,
        "rope_theta": 600000,
        "rope_scaling": None,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "use_qk_norm": True,
        "use_rmsnorm": True,
        "router_dtype": "fp32",
    },
    "LLaDA2.2": {"architectures": ["LLaDA2MoeModelLM"], "expert_capacity": 6},
    "NemotronLabsDiffusionModel": COMMON
    | {
        "model_type": "nemotron_labs_diffusion",
        "auto_map": {"AutoConfig": "none.None"},
        "attn_implementation": "sdpa",
        "attention_bias": False,
        "mlp_bias": False,
        "dlm_paradigm": "bidirectional",
        "dlm_loss_weight": None,
        "dp_varying_mask_ratio": False,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 64.0,
            "original_max_position_embeddings": 64,  # so that tests go beyond it
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "Fast_dLLM_QwenForCausalLM": {key: COMMON[key] for key in COMMON if key != "head_dim"}
    | {
        "model_type": "Fast_dLLM_Qwen",
        "auto_map": {"AutoConfig": "none.None"},
        "hidden_size": 128,
        "attention_dropout": 0.0,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "max_window_layers": 28,
        "sliding_window": None,
        "use_sliding_window": False,
    },
}
CONFIGS["LLaDA2.2"] = CONFIGS["LLaDA2MoeModelLM"] | CONFIGS["LLaDA2.2"]
NATIVE: dict[str, tuple[Any, Any]] = {
    "SDARForCausalLM": (Qwen3Config, Qwen3ForCausalLM),
    "SDARMoeForCausalLM": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "NemotronLabsDiffusionModel": (Ministral3Config, Ministral3ForCausalLM),
    "Fast_dLLM_QwenForCausalLM": (Qwen2Config, Qwen2ForCausalLM),
}
"""transformers' models of the same layers."""


def build(architecture: str, config: Mapping[str, Any]) -> nn.Module:
    """transformers' model of these layers, or our own."""
    if architecture == "LLaDA2MoeModelLM":
        return LLaDA2(SimpleNamespace(**config))
    kind, model = NATIVE[architecture]
    own = {key: config[key] for key in config if key not in ("model_type", "auto_map")}
    return model._from_config(kind(**own), attn_implementation="eager")


@torch.no_grad()
def make_checkpoint(
    path: Path, block_length: int, architecture: str = "SDARForCausalLM"
) -> tuple[Path, "Reference"]:
    """Random, in the published layout, with the mask behind the tokenizer's vocabulary."""
    tokenizer = build_tokenizer()
    mask_id = len(tokenizer)
    config = {"architectures": [architecture]} | CONFIGS[architecture]
    architecture = config["architectures"][0]
    config |= {
        "vocab_size": mask_id + 64,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        FAMILIES[architecture].block_key: block_length,
        "mask_token_id": mask_id,
    }
    if "expert_capacity" in config:
        config |= {"delete_token_id": mask_id + 1, "split_token_id": mask_id + 2}
    model = build(architecture, config).eval()
    randomize(model, mask_id)
    if "expert_capacity" in config:
        likes_to_move(model, mask_id, mask_id + 1, mask_id + 2)
    path.mkdir(exist_ok=True)
    save_file(published_weights(model, architecture), path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(path)
    return path, Reference(model, block_length, mask_id)


def randomize(model: nn.Module, mask_id: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        if name.endswith("bias"):
            weight.copy_(0.1 * drawn)
        elif weight.dim() < 2:
            weight.copy_(1 + 0.1 * drawn)
        elif name == "lm_head.weight":
            # Logits of standard deviation 3; the mask is no answer.
            weight.copy_(3 * drawn * weight.shape[-1] ** -0.5)
            weight[mask_id:] = 0.0
        elif "embed" in name:
            weight.copy_(drawn)
        else:
            weight.copy_(drawn * weight.shape[-1] ** -0.5)


def likes_to_move(
    model: Any, mask_id: int, *tokens: int, deviation: float = 12.0, seed: int = 1
) -> None:
    """These tokens are often the most probable ones, by the standard deviation of their logits. Of
    the others, the one that is there often is, so that blocks come to an end."""
    generator = torch.Generator().manual_seed(seed)
    weight, embedding = model.lm_head.weight, model.model["word_embeddings"].weight
    weight[:mask_id] += 0.5 * embedding[:mask_id]
    for token in tokens:
        drawn = torch.randn(weight.shape[-1], generator=generator)
        weight[token].copy_(deviation * drawn * weight.shape[-1] ** -0.5)


def published_weights(model: nn.Module, architecture: str) -> dict[str, torch.Tensor]:
    """transformers keeps the experts of a layer together, checkpoints do not."""
    found: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        if architecture == "NemotronLabsDiffusionModel":
            name = name.replace("model.", "encoder.", 1).replace("lm_head.", "diffusion_head.", 1)
        layer, dot, stacked = name.partition(".mlp.experts.")
        if stacked not in ("gate_up_proj", "down_proj"):
            found[name] = weight.contiguous()
            continue
        for i, expert in enumerate(weight):
            parts = {"down_proj": expert}
            if stacked == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            for part, own in parts.items():
                found[f"{layer}{dot}{i}.{part}.weight"] = own.contiguous()
    return found


class Rule(NamedTuple):
    name: str = "dynamic"
    num_steps: int | None = None  # None: a token per step
    threshold: float = 0.85
    bound: float = 0.35
    edit: float | None = None
    most_edit_steps: int = 16
    temperature: float = 0.0


class Step(NamedTuple):
    """Of the positions of a block that the prompt does not hold."""

    tokens: list[int]
    revealed: list[int]
    canvas: list[int]
    finished: bool


class Placed(NamedTuple):
    """How a token came to its position: revealed, or put in the place of a revealed one."""

    step: int  # of its block, counted from 1; 0: known before the first
    logprobs: torch.Tensor  # [V], of the distribution it was drawn from


@dataclass
class Trajectory:
    steps: list[Step] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    """Of each token, and of those behind an answer's end."""


def uniform(seed: int, start: int, length: int, step: int, stream: int) -> torch.Tensor:
    """[length] float64 in [0, 1), by which a request's positions from `start` on are drawn."""
    positions = torch.arange(start, start + length)[None]
    key = noise.keys_from_seeds(torch.tensor([seed]))
    return noise.uniform(key, positions, torch.tensor([step]), stream)[0]


def until_stop(tokens: list[int], stops: frozenset[int]) -> list[int]:
    """Up to the first token that ends an answer."""
    over = [i for i, token in enumerate(tokens) if token in stops]
    return tokens[: over[0] + 1] if over else tokens


class Reference:
    allowed: list[int] | None = None
    """Tokens that there are; None: all. A random model drafts one of a few some of the time."""

    def __init__(self, model: nn.Module, block_length: int, mask_id: int) -> None:
        self.model, self.block_length, self.mask_id = model, block_length, mask_id

    @torch.inference_mode()
    def logits(self, tokens: list[int], *, num_causal: int = 0) -> torch.Tensor:
        """[T, V] fp32 of whole blocks, or of a prompt. The last `num_causal` rows see no later
        ones."""
        position = torch.arange(len(tokens))
        length = torch.where(position < len(tokens) - num_causal, self.block_length, 1)
        block = (position // length + 1) * length - 1  # the last position that a row sees
        seen, ids = block[:, None] >= position, torch.tensor(tokens)
        if isinstance(self.model, LLaDA2):
            return self.only_allowed(self.model(ids, seen))
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        found = self.model(input_ids=ids[None], attention_mask=mask[None, None]).logits[0]
        return self.only_allowed(found)

    def only_allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` [T, V] with the other tokens masked."""
        if self.allowed is None:
            return logits
        found = torch.full_like(logits, MASKED_LOGIT)
        found[:, self.allowed] = logits[:, self.allowed]
        return found

    def generate(self, prompt: list[int], max_tokens: int, rule: Rule, seed: int = 0) -> Trajectory:
        """Whole blocks, the last one cut off."""
        B, found = self.block_length, Trajectory()
        num_steps = rule.num_steps or B
        known = list(prompt)
        while len(known) < len(prompt) + max_tokens:
            start = len(known) // B * B
            block = known[start:] + [self.mask_id] * (B - len(known) % B)
            first, step, edit_steps, finished = len(known) - start, 0, 0, False
            shown: set[int] = set()  # a mask that the model itself answers counts as revealed
            placed: dict[int, Placed] = {}
            while not finished:
                tokens, probability, entropy, logprobs = self._draw(
                    known[:start], block, rule, seed, step
                )
                hidden = [i for i in range(first, B) if i not in shown]
                least = B // num_steps + (step < B % num_steps)
                chosen = published(
                    rule.name, hidden, probability, entropy, least, rule.threshold, rule.bound
                )
                if rule.edit is not None:  # none of the prompt's
                    own = set(range(first, B)) - set(hidden)
                    changed = {
                        i for i in own if tokens[i] != block[i] and probability[i] > rule.edit
                    }
                    edit_steps += not hidden
                    finished = not hidden and (not changed or edit_steps == rule.most_edit_steps)
                    chosen |= changed
                block = [tokens[i] if i in chosen else token for i, token in enumerate(block)]
                tokens = [tokens[i] if i in hidden else token for i, token in enumerate(block)]
                step, shown = step + 1, shown | chosen
                placed |= {i: Placed(step, logprobs[i]) for i in chosen}
                finished = finished or (rule.edit is None and len(shown) == B - first)
                revealed = [int(i in shown) for i in range(first, B)]
                found.steps.append(Step(tokens[first:], revealed, block[first:], finished))
            known = known[:start] + block
            found.placed += [placed[i] for i in range(first, B)]
        found.tokens = known[len(prompt) :][:max_tokens]
        return found

    def _draw(
        self, known: list[int], block: list[int], rule: Rule, seed: int, step: int
    ) -> tuple[list[int], list[float], list[float], torch.Tensor]:
        """Candidates of a block, their probabilities and the entropies they come with, and the
        log-probabilities [B, V] of all tokens."""
        logits = self.logits(known + block)[len(known) :] / (rule.temperature or 1.0)
        probs = logits.softmax(-1)
        tokens = logits.argmax(-1)
        if rule.temperature:
            draw = uniform(seed, len(known), len(block), step, noise.CANDIDATE)
            tokens = sample_by_inversion(probs, draw)
        chosen = probs.gather(-1, tokens[:, None])[:, 0]
        entropy = -(probs * probs.log()).sum(-1)
        return tokens.tolist(), chosen.tolist(), entropy.tolist(), logits.log_softmax(-1)

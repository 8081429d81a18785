"""DiffusionGemma's forward for training: one padded batch, several canvases for each prefix.

It reads the parameters of transformers' model and computes the same numbers (tests compare both);
it is separate because training wants the prefix encoded once for several noised canvases, masks
built once per batch, and the experts run on sorted rows.

Legend: B prefixes, P prefix length (left-padded), K canvases per prefix, C canvas length, H hidden,
V vocabulary, N rows of tokens.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DiffusionGemmaForBlockDiffusion

from checkpoints.recipes.fused_ops import EPS, Ops
from checkpoints.recipes.tokenizer import IMAGE_ID

KeyValue = tuple[Tensor, Tensor]  # each [B, heads, P, head_dim]


def _same_image(ids: Tensor) -> Tensor:
    """[B, P, P] bool: whether two places are of the same run of image tokens; ids [B, P]."""
    is_image = ids == IMAGE_ID
    starts = is_image & ~F.pad(is_image, (1, 0))[:, :-1]
    number = torch.where(is_image, starts.cumsum(-1), 0)
    return (number[:, :, None] == number[:, None, :]) & is_image[:, None, :]


@dataclass
class Prefix:
    """What the encoder leaves for the decoder."""

    layers: list[KeyValue]
    is_token: Tensor  # [B, P] bool, False on left padding


class TrainingForward:
    """Functions `encode` and `decode` over the parameters of `model`."""

    def __init__(self, model: DiffusionGemmaForBlockDiffusion, *, compiled: bool = False):
        decoder = model.model.decoder
        self.config = model.config.text_config
        assert self.config.rms_norm_eps == EPS
        self.ops = Ops().compiled() if compiled else Ops()
        self.decoder = decoder
        self.layers = decoder.layers
        self.embedding = decoder.embed_tokens.weight
        self.embed_scale = self.config.hidden_size**0.5
        self.window_left = self.config.sliding_window - 1  # prefix tokens a canvas row may see
        self.load_balance: list[Tensor] = []  # one term per layer and pass, see `_experts`

    def encode(self, ids: Tensor, is_token: Tensor, images: Tensor | None = None) -> Prefix:
        """Causal pass over the prefix. ids [B, P], is_token [B, P] bool.

        images [N, H]: what stands for the image tokens, one after the other. The tokens of one
        image see each other both ways.
        """
        length = ids.shape[1]
        index = torch.arange(length, device=ids.device)
        distance = index[:, None] - index[None, :]
        causal = (distance >= 0) & is_token[:, None, None, :]
        # Padding rows see themselves, so that no softmax row is empty.
        causal = causal | (distance == 0)
        masks = {
            "full_attention": causal,
            "sliding_attention": causal & (distance < self.config.sliding_window),
        }
        x = F.embedding(ids, self.embedding) * self.embed_scale
        if images is not None:
            masks = {kind: mask | _same_image(ids)[:, None] for kind, mask in masks.items()}
            x = x.masked_scatter((ids == IMAGE_ID)[..., None], images)
        rotary = self._rotary(index)
        key_values = []
        for layer in self.layers:
            kind = layer.self_attn.layer_type
            q, k, v = self._qkv(layer, x, *rotary[kind])
            key_values.append((k, v))
            x = self._finish_layer(layer, x, self._attend(q, k, v, masks[kind]))
        return Prefix(key_values, is_token)

    def decode(self, canvas: Tensor, prefix: Prefix, previous_logits: Tensor | None) -> Tensor:
        """Logits [B, K, C, V] of canvases [B, K, C].

        previous_logits [B', K, C, V]: temperature-scaled logits of the step before, for the first
        B' <= B prefixes; the other rows, or all with None, have no self-conditioning.
        """
        batch, per_prefix, canvas_length = canvas.shape
        x = F.embedding(canvas.flatten(0, 1), self.embedding) * self.embed_scale
        x = self._self_condition(x, previous_logits)
        prefix_length = prefix.is_token.shape[1]
        positions = torch.arange(canvas_length, device=canvas.device) + prefix_length
        rotary = self._rotary(positions)
        for layer, (prefix_k, prefix_v) in zip(self.layers, prefix.layers, strict=True):
            kind = layer.self_attn.layer_type
            seen = prefix_length
            if kind == "sliding_attention":
                seen = min(self.window_left, prefix_length)
            q, k, v = self._qkv(layer, x, *rotary[kind])
            start = prefix_length - seen
            k = torch.cat((prefix_k[:, :, start:].repeat_interleave(per_prefix, 0), k), dim=2)
            v = torch.cat((prefix_v[:, :, start:].repeat_interleave(per_prefix, 0), v), dim=2)
            mask = F.pad(prefix.is_token[:, start:], (0, canvas_length), value=True)
            mask = mask.repeat_interleave(per_prefix, 0)[:, None, None, :]
            mask = mask.expand(-1, 1, canvas_length, -1)
            x = self._finish_layer(layer, x, self._attend(q, k, v, mask))
        x = self.ops.rms_norm(x, self.decoder.norm.weight)
        cap = self.config.final_logit_softcapping
        logits = torch.tanh(F.linear(x, self.embedding).float() / cap) * cap
        return logits.unflatten(0, (batch, per_prefix))

    def _self_condition(self, x: Tensor, previous_logits: Tensor | None) -> Tensor:
        """post_norm(x + mlp(soft embeddings)); x [B*K, C, H]."""
        module = self.decoder.self_conditioning
        if previous_logits is not None:
            soft = previous_logits.flatten(0, 1).softmax(-1) @ self.embedding * self.embed_scale
            signal = self._mlp(module, self.ops.rms_norm(soft, module.pre_norm.weight))
            x = torch.cat((x[: len(signal)] + signal, x[len(signal) :]))
        return self.ops.rms_norm(x, None)

    def _rotary(self, positions: Tensor) -> dict[str, KeyValue]:
        """cos and sin, each [length, 1, head_dim], of both kinds of layer."""
        table = {}
        for kind in set(self.config.layer_types):
            inv_freq = getattr(self.decoder.rotary_emb, f"{kind}_inv_freq")
            angles = positions[:, None].float() * inv_freq
            angles = torch.cat((angles, angles), dim=-1)[:, None, :]
            table[kind] = (angles.cos(), angles.sin())
        return table

    def _qkv(
        self, layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [B, heads, length, head_dim]."""
        attn = layer.self_attn
        ops = self.ops
        x = ops.rms_norm(x, layer.input_layernorm.weight)
        shape = (*x.shape[:-1], -1, attn.head_dim)
        raw_k = attn.k_proj(x).view(shape)
        # Full-attention layers have no v_proj: the keys before norm and rotation are the values.
        raw_v = raw_k if attn.v_proj is None else attn.v_proj(x).view(shape)
        q = ops.norm_rotate(attn.q_proj(x).view(shape), attn.q_norm.weight, cos, sin)
        k = ops.norm_rotate(raw_k, attn.k_norm.weight, cos, sin)
        v = ops.rms_norm(raw_v, None)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """[B, length, heads * head_dim]; the norms on q and k replace the 1/sqrt(d) scale."""
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        return out.transpose(1, 2).flatten(2)

    def _finish_layer(self, layer: nn.Module, x: Tensor, attended: Tensor) -> Tensor:
        """Everything after attention: output projection, dense MLP and experts side by side."""
        ops = self.ops
        out = layer.self_attn.o_proj(attended)
        x = ops.add_norm(x, out, layer.post_attention_layernorm.weight)
        dense = self._mlp(layer.mlp, ops.rms_norm(x, layer.pre_feedforward_layernorm.weight))
        sparse = self._experts(layer, x.flatten(0, 1)).view_as(x)
        return ops.merge_branches(
            x,
            dense,
            sparse,
            layer.post_feedforward_layernorm_1.weight,
            layer.post_feedforward_layernorm_2.weight,
            layer.post_feedforward_layernorm.weight,
            layer.layer_scalar,
        )

    def _mlp(self, module: nn.Module, x: Tensor) -> Tensor:
        return module.down_proj(self.ops.gated_gelu(module.gate_proj(x), module.up_proj(x)))

    def _experts(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Top-k experts on rows x [N, H]; rows are sorted by expert so each is one matmul."""
        router, experts = layer.router, layer.experts
        scaled = self.ops.rms_norm(x, None) * router.scale * router.scalar_root_size
        probs = router.proj(scaled).softmax(-1)
        weights, chosen = probs.topk(self.config.top_k_experts, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True) * router.per_expert_scale[chosen]

        counts = torch.bincount(chosen.flatten(), minlength=self.config.num_experts)
        if torch.is_grad_enabled():
            # Switch Transformer load balance (arXiv:2101.03961, eq. 4): 1 when experts are even.
            share = counts / counts.sum()
            self.load_balance.append(self.config.num_experts * (share * probs.mean(0)).sum())

        order = chosen.flatten().argsort()
        rows = order // self.config.top_k_experts
        inputs = self.ops.rms_norm(x, layer.pre_feedforward_layernorm_2.weight)[rows]
        outputs = []
        for expert, block in enumerate(inputs.split(counts.tolist())):
            gate, up = F.linear(block, experts.gate_up_proj[expert]).chunk(2, dim=-1)
            hidden = self.ops.gated_gelu(gate, up)
            outputs.append(F.linear(hidden, experts.down_proj[expert]))
        weighted = torch.cat(outputs) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, rows, weighted)

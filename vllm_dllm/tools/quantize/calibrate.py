"""Measures the largest inputs of the quantised linears while a model denoises.

transformers' `generate` runs over the prompts. Most rows are canvases, from pure noise to the
finished block, with self-conditioning. The other rows are prompts and finished blocks in the
encoder. Ranges that are measured on finished text alone would not cover what the linears see.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from vllm_dllm.tools.inputs import encode_prompt_rows, read_prompt_rows
from vllm_dllm.tools.resumable import write_json

NUM_PROMPTS = 128
"""The most prompts to denoise. llm-compressor's NVFP4 examples use 20; the largest input grows
slowly with their number."""
NUM_CANVASES = 2
"""Canvases per prompt. The second one is denoised after a block that the model wrote."""

Ranges = dict[str, list[float]]
"""Input group (see `plan.Linear`) -> largest magnitudes: one number, or one for each expert."""


def read_prompts(path: Path, checkpoint: Path, config: DiffusionGemmaConfig) -> list[list[int]]:
    """Returns the token ids of at most NUM_PROMPTS rows, spread evenly over the file. Raises
    InputError if the file or a row cannot be used."""
    rows = read_prompt_rows(path)
    count = min(len(rows), NUM_PROMPTS)
    return encode_prompt_rows(
        [rows[i * len(rows) // count] for i in range(count)],
        checkpoint,
        config.text_config.max_position_embeddings - NUM_CANVASES * config.canvas_length,
        f"{NUM_CANVASES} canvases must fit after it in the model's context; shorten it",
    )


@contextmanager
def record_inputs(
    model: DiffusionGemmaForBlockDiffusion, largest: dict[str, torch.Tensor]
) -> Iterator[None]:
    """Records the inputs of the quantised linears in all forwards inside the block. `largest` has
    the ranges so far by input group, [1] or [num_experts] fp32 on the model's device. It is changed
    in place. An encoder layer and a decoder layer share a range: they are one layer in vLLM."""

    def record(group: str, found: torch.Tensor) -> None:
        largest[group] = torch.maximum(largest[group], found) if group in largest else found

    def record_linear(module: nn.Module, inputs: tuple[torch.Tensor], group: str) -> None:
        record(group, inputs[0].abs().amax().float().reshape(1))

    def record_experts(experts: nn.Module, inputs: tuple[torch.Tensor, ...], name: str) -> None:
        """Records the largest input and inner activation of each expert that a token is routed to.
        Computes inner activations a second time, because the forward does not show them."""
        hidden, chosen = inputs[0], inputs[1]  # [T, H], [T, top_k]
        outer = torch.zeros(experts.num_experts, device=hidden.device)
        inner = torch.zeros_like(outer)
        for expert in chosen.unique().tolist():
            routed = hidden[(chosen == expert).any(-1)]
            gate, up = F.linear(routed, experts.gate_up_proj[expert]).chunk(2, dim=-1)
            outer[expert] = routed.abs().amax()
            inner[expert] = (experts.act_fn(gate) * up).abs().amax()
        record(f"{name}.gate_up_proj", outer)
        record(f"{name}.down_proj", inner)

    handles = []
    for layers in (model.model.encoder.language_model.layers, model.model.decoder.layers):
        for i, layer in enumerate(layers):
            name = f"model.decoder.layers.{i}"
            for module, group in (
                (layer.self_attn.q_proj, "self_attn.qkv_proj"),
                (layer.self_attn.o_proj, "self_attn.o_proj"),
                (layer.mlp.gate_proj, "mlp.gate_up_proj"),
                (layer.mlp.down_proj, "mlp.down_proj"),
            ):
                hook = partial(record_linear, group=f"{name}.{group}")
                handles.append(module.register_forward_pre_hook(hook))
            hook = partial(record_experts, name=f"{name}.experts")
            handles.append(layer.experts.register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def calibrate(
    checkpoint: Path, prompts: list[list[int]], results: Path, advance: Callable[[int], None]
) -> Ranges:
    """Denoises answers to all prompts, and returns the ranges of the inputs. Loads the model.

    The ranges are written to `results` after each prompt, and an interrupted calibration continues
    from that file. `advance` is called with the number of prompts that were done since the last
    call. Sets PyTorch's global seed for each prompt, so the result does not depend on
    interruptions.
    """
    num_done = 0
    known_ranges = Ranges()
    if results.exists():
        state = json.loads(results.read_text())
        num_done, known_ranges = state["done"], state["ranges"]
        advance(num_done)
    if num_done == len(prompts):
        return known_ranges
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(
        checkpoint, dtype="auto", experts_implementation="eager"
    )
    model.to(device).eval()
    largest = {group: torch.tensor(v, device=device) for group, v in known_ranges.items()}
    for i in range(num_done, len(prompts)):
        torch.manual_seed(i)
        with torch.no_grad(), record_inputs(model, largest):
            # One prompt at a time: padding would count as input.
            model.generate(
                input_ids=torch.tensor([prompts[i]], device=device),
                max_new_tokens=NUM_CANVASES * model.config.canvas_length,
            )
        known_ranges = {group: values.tolist() for group, values in largest.items()}
        write_json(results, {"done": i + 1, "ranges": known_ranges})
        advance(1)
    return known_ranges

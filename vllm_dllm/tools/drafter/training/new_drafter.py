"""A new drafter, for a run that does not continue from one: its layout and first weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3Config

from vllm_dllm.errors import InputError
from vllm_dllm.tools.drafter.training.options import Options
from vllm_dllm.tools.drafter.training.reference import DFlashDrafter, drafter_config
from vllm_dllm.tools.drafter.training.target_states import check_fit


def new_config(target_path: Path, text_config: Any, options: Options) -> Qwen3Config:
    layer_ids = options.target_layer_ids
    if layer_ids is None:
        layer_ids = spread_layers(text_config.num_hidden_layers, options.num_layers)
    if options.block_size < 2:
        raise InputError(
            f"expected a block of at least 2 slots, anchor and mask, got {options.block_size}"
        )
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    mask_token = options.mask_token or tokenizer.mask_token
    if mask_token is None:
        raise InputError(
            "the target's tokenizer has no mask token: name one that is never written with "
            "--mask-token, such as an unused special token"
        )
    mask_token_id = tokenizer.get_vocab().get(mask_token)
    if mask_token_id is None:
        raise InputError(f"the target's vocabulary has no token {mask_token!r} for the mask")
    config = drafter_config(
        text_config,
        num_layers=options.num_layers,
        target_layer_ids=layer_ids,
        mask_token_id=mask_token_id,
        block_size=options.block_size,
    )
    check_fit(config, text_config)
    return config


def spread_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Spread evenly from the second to the third last layer, as in the published drafters."""
    if count == 1:
        return (num_target_layers // 2,)
    first, last = 1, max(num_target_layers - 3, 1)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


@torch.no_grad()
def initialize(drafter: DFlashDrafter) -> None:
    """Fan-in scaled normal matrices; norms stay one."""
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)

"""SDAR's published loop over transformers' Qwen3: one prompt at a time, with a KV cache.

Each denoise step computes the block over the cache; when nothing is hidden any more, one more
forward writes its keys and values. The rule is `low_confidence_dynamic`, greedy.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache, Qwen3ForCausalLM

from vllm_dllm.models.masked_configs import SDARConfig


class Loop:
    def __init__(self, checkpoint: str, block_length: int) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        config = SDARConfig.from_pretrained(checkpoint)
        self.block_length, self.mask_id = block_length, config.mask_token_id
        self.eos = config.eos_token_id
        self.model = Qwen3ForCausalLM(config).eval().float()
        weights = load_file(Path(checkpoint) / "model.safetensors")
        missing = self.model.load_state_dict(weights, strict=False).missing_keys
        assert missing == ["lm_head.weight"], missing  # tied to the embeddings
        self.forwards, self.steps = 0, 0

    def run(
        self, prompts: list[list[int]], batch: int, max_tokens: int, threshold: float
    ) -> dict[str, Any]:
        """`batch` has no part in it."""
        self.forwards, self.steps, outputs = 0, 0, []
        started = time.perf_counter()
        for prompt in prompts:
            outputs.append(self.generate(prompt, max_tokens, threshold))
        seconds = time.perf_counter() - started
        counted = {"forwards": self.forwards, "steps": self.steps}
        return {"seconds": seconds, "outputs": outputs, **counted}

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_tokens: int, threshold: float) -> list[int]:
        B, cache = self.block_length, DynamicCache()
        known = list(prompt)
        start = len(known) // B * B
        if start:
            self._forward(torch.tensor(known[:start]), 0, cache)
        while len(known) < len(prompt) + max_tokens:
            start = len(known) // B * B
            block = torch.tensor(known[start:] + [self.mask_id] * (B - len(known) % B))
            hidden = torch.arange(start, start + B) >= len(known)
            while hidden.any():
                self.steps += 1
                probability, token = self._forward(block, start, cache).softmax(-1).max(-1)
                if start == 0:  # which `crop` takes for no limit
                    cache = DynamicCache()
                else:
                    cache.crop(start)
                probability = probability.where(hidden, -torch.inf)
                revealed = hidden & (probability > threshold)
                revealed[probability.argmax()] = True
                block = token.where(revealed, block)
                hidden &= ~revealed
            self._forward(block, start, cache)
            answer = block[len(known) - start :].tolist()
            if self.eos in answer:
                known += answer[: answer.index(self.eos) + 1]
                break
            known += answer
        return known[len(prompt) :][:max_tokens]

    def _forward(self, tokens: Tensor, start: int, cache: DynamicCache) -> Tensor:
        """[T, V] logits of whole blocks from position `start`, which join the cache."""
        self.forwards += 1
        place = torch.arange(start, start + len(tokens))
        end = (place // self.block_length + 1) * self.block_length
        seen = torch.arange(start + len(tokens)) < end[:, None]
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        return self.model(
            input_ids=tokens[None],
            position_ids=place[None],
            attention_mask=mask[None, None],
            past_key_values=cache,
        ).logits[0]

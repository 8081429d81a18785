"""Baseline: transformers' `generate`, static batches, its defaults, on all cores.

The sequence of prompts is cut into batches; a batch ends when its slowest row does.
"""

import os
import statistics
import time
from itertools import pairwise
from typing import Any


class Reference:
    def __init__(self, checkpoint: str, canvas_length: int, dtype: str = "float32") -> None:
        import torch
        from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

        threads = len(os.sched_getaffinity(0))
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.torch = torch
        self.canvas_length = canvas_length
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.model = DiffusionGemmaForBlockDiffusion.from_pretrained(
            checkpoint, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self.description = {
            "system": "transformers generate",
            "attention": "sdpa",
            "threads": threads,
            "experts": self.model.config.text_config._experts_implementation,
        }
        self._encodings = 0
        self._steps_ms: list[float] = []  # when each denoise step began
        self.model.model.encoder.register_forward_pre_hook(self._count_encoding)
        self.model.model.decoder.register_forward_pre_hook(self._time_step)

    def _count_encoding(self, *_: Any) -> None:
        self._encodings += 1

    def _time_step(self, *_: Any) -> None:
        self._steps_ms.append(1000 * time.perf_counter())

    def run(self, prompts: list[list[int]], batch: int, max_tokens: int) -> dict[str, Any]:
        """Decodes `prompts` in batches of `batch`, left-padded."""
        torch = self.torch
        eos, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        outputs: list[list[int]] = []
        first_token_seconds: list[float] = []
        denoise_steps = num_blocks = 0.0
        encodings, steps = self._encodings, len(self._steps_ms)
        started = time.perf_counter()
        with torch.inference_mode():
            for first in range(0, len(prompts), batch):
                rows = prompts[first : first + batch]
                batch_started = time.perf_counter()
                width = max(map(len, rows))
                input_ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
                mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
                options: dict[str, Any] = {"attention_mask": mask} if batch > 1 else {}
                result = self.model.generate(
                    input_ids=input_ids, max_new_tokens=max_tokens, **options
                )
                new_tokens = result.sequences[:, width:]
                for row in new_tokens.tolist():
                    outputs.append(row[: row.index(eos) + 1] if eos in row else row)
                num_tokens = (new_tokens != pad).sum(-1)
                denoise_steps += float((num_tokens / result.tokens_per_forward).round().sum())
                num_blocks += float((num_tokens / self.canvas_length).ceil().sum())
                # A caller gets nothing before the batch has ended.
                first_token_seconds += [time.perf_counter() - batch_started] * len(rows)
        return {
            "seconds": time.perf_counter() - started,
            "outputs": outputs,
            "forwards": self._encodings - encodings + len(self._steps_ms) - steps,
            # From the start of one step to that of the next.
            "ms_per_step": statistics.median(
                after - before for before, after in pairwise(self._steps_ms[steps:])
            ),
            "steps_per_block": denoise_steps / num_blocks,
            "first_token_seconds": first_token_seconds,
        }

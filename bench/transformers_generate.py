"""Baseline: transformers' `generate`, static batches, its defaults unless told otherwise.

The sequence of prompts is cut into batches; a batch ends when its slowest row does.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from bench import system


class Reference:
    def __init__(
        self,
        checkpoint: str,
        canvas_length: int,
        num_threads: int,
        attention: str = "sdpa",
        cache: str = "",
        experts: str = "",
        dtype: str = "float32",
    ) -> None:
        import torch
        from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion

        torch.set_num_threads(num_threads)
        torch.manual_seed(0)
        self.torch = torch
        self.canvas_length = canvas_length
        self.cache = cache
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.model = DiffusionGemmaForBlockDiffusion.from_pretrained(
            checkpoint, dtype=getattr(torch, dtype), attn_implementation=attention
        ).eval()
        if experts:
            self.model.set_experts_implementation(experts)
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
                if self.cache:
                    options["cache_implementation"] = self.cache
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

    def handlers(self) -> dict[str, Callable[..., Any]]:
        return {"run": self.run}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--canvas-length", type=int, required=True)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--cache", default="", help="cache_implementation; static compiles")
    parser.add_argument("--experts", default="", help="experts implementation")
    args = parser.parse_args()

    def start() -> tuple[dict[str, Any], Any]:
        reference = Reference(
            args.checkpoint,
            args.canvas_length,
            args.num_threads,
            args.attention,
            args.cache,
            args.experts,
        )
        description = {
            "system": "transformers generate",
            "attention": args.attention,
            "threads": args.num_threads,
            "experts": reference.model.config.text_config._experts_implementation,
        }
        return description, reference.handlers()

    system.serve(start)


if __name__ == "__main__":
    main()

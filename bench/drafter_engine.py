"""A measured system of `bench.drafter`: a target alone, or with a drafter, stock vLLM's or ours.

Stock vLLM drafts on the CPU as its DiffusionGemma does (`stock_vllm.py`): a plugin lends it our
native versions of the runner's kernels and nothing else.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from bench import stock_vllm
from bench.engine import Engine
from bench.step_split import DRAFT, DRAFT_LOGITS, LAYERS, MODEL_PARTS

MAX_NUM_SEQS = 16


class DraftEngine(Engine):
    counters = "vllm:spec_decode_num_"

    def __init__(
        self,
        target: str,
        drafter: str | None = None,  # None: the target alone
        num_drafts: int | None = None,
        settings: dict[str, Any] | None = None,  # of our drafters
        is_stock: bool = False,
    ) -> None:
        options: dict[str, Any] = {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": 2048}
        if drafter is None:
            # The faster of the two runners is what a drafter has to beat.
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        else:
            options["speculative_config"] = {
                "method": "dflash",
                "model": drafter,
                "num_speculative_tokens": num_drafts,
            }
        if settings:
            options["additional_config"] = {"vllm_dllm": {"drafter": settings}}
        if is_stock:
            self._folder = tempfile.TemporaryDirectory()
            stock_vllm.set_environment(Path(self._folder.name))
        super().__init__(target, **options)

    def parts(self, step: dict[str, float]) -> dict[str, float]:
        verify = step[LAYERS] + step.get(MODEL_PARTS["embed_input_ids"], 0.0)
        draft_logits = step.get(DRAFT_LOGITS, 0.0)
        found = {
            "draft_ms": step.get(DRAFT, 0.0) - draft_logits,
            "verify_ms": verify,
            "lm_heads_ms": step.get(MODEL_PARTS["compute_logits"], 0.0) + draft_logits,
        }
        return {**found, "host_ms": step["step"] - sum(found.values()), "step_ms": step["step"]}

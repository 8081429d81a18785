"""A masked model in this project's engine, with or without a commit of its own for each block, one
or several blocks in flight, by its threshold or with drafts that it verifies."""

from typing import Any

from vllm.v1.request import Request

from bench.engine import Engine
from vllm_dllm.scheduling.scheduler import CanvasScheduler


class SeparateCommits(CanvasScheduler):
    """As servers of masked models do elsewhere (SGLang's): a block's commit has a forward of its
    own, and so has a prompt."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.family.joins_canvases = False

    def block_emitted(self, request: Request, block_length: int) -> None:
        super().block_emitted(request, block_length)
        request.spec_token_ids = []


class MaskedEngine(Engine):
    counters = "vllm:diffusion_num_"

    def __init__(
        self,
        checkpoint: str,
        block_length: int,
        separate_commits: bool = False,
        blocks_in_flight: int = 1,
        verifies: bool = False,
    ) -> None:
        self.verifies = verifies
        settings = {"vllm_dllm": {"blocks_in_flight": blocks_in_flight}}
        options: dict[str, Any] = {"additional_config": settings}
        if separate_commits:
            options["scheduler_cls"] = f"{__name__}.SeparateCommits"
        super().__init__(checkpoint, hf_overrides={"block_size": block_length}, **options)

    def run(
        self, prompts: list[list[int]], batch: int, max_tokens: int, **sampling: float
    ) -> dict[str, Any]:
        """`sampling` has `threshold`, what a token's probability must exceed, unless drafts are
        verified. Greedy."""
        extra_args: dict[str, Any] = {"diffusion_accept_probability": sampling["threshold"]}
        if self.verifies:
            extra_args = {"diffusion_acceptance": "verified"}
        return super().run(prompts, batch, max_tokens, temperature=0.0, extra_args=extra_args)

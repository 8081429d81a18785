"""Answers the scheduler's questions about canvases, by where a model's blocks are counted from."""

from vllm.config import VllmConfig
from vllm.v1.request import Request

from vllm_dllm.compat.scheduler import stock_canvas_width
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.config.masked import MaskedConfig
from vllm_dllm.config.step_sizes import narrowed_width
from vllm_dllm.requests.options import load_option
from vllm_dllm.scheduling.spared_forwards import has_own_steps, joins_canvases


class CanvasFamily:
    """Answers the scheduler's questions about canvases that are counted from the prompt's end:
    DiffusionGemma's, which begin as noise, and those of masked models whose known tokens are
    causal. Of other masked models they are `AlignedBlocks`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        canvas_length: int,  # of the served canvases, in tokens
        masked: MaskedConfig | None,  # None: DiffusionGemma
    ) -> None:
        self.vllm_config, self.canvas_length, self.masked = vllm_config, canvas_length, masked
        extension = ExtensionConfig.from_additional_config(vllm_config.additional_config)
        self.fits_canvases = masked is None and extension.fit_canvas
        """Whether a request for few tokens may have a narrower canvas than others."""
        self.knows_first_token = masked is not None and masked.family.knows_first_token
        """Whether a canvas' first token is known before its first step."""
        is_causal = masked is not None and masked.family.is_causal
        self.joins_canvases = joins_canvases(vllm_config) and not is_causal
        """Whether a canvas may share the forward of the tokens before it."""

    def check_server(self, block_size: int) -> None:
        """Raises ValueError if the server's settings do not suit the canvases: blocks of masked
        models must be whole in pages of the KV cache, of `block_size` tokens, and be prefilled by
        our worker."""
        if self.masked is None:
            return
        self.masked.check_cache_page(block_size)
        if not has_own_steps(self.vllm_config):
            raise ValueError(
                "A masked model needs our worker and steps that are not one CUDA graph, got "
                f"--worker-cls {self.vllm_config.parallel_config.worker_cls} and cudagraph_mode "
                f"{self.vllm_config.compilation_config.cudagraph_mode}: finished blocks are "
                "prefilled. Leave them out."
            )

    def canvas_width(self, request: Request) -> int:
        """Returns how many rows the current canvas of `request` has, or the next one if a block
        just ended. Includes rows behind it that are part of no block."""
        return self.num_answer_tokens(request)

    def num_answer_tokens(self, request: Request) -> int:
        """Returns how many tokens of the answer the current canvas of `request` has: vLLM's width,
        narrowed to the tokens that may still come if the request fits canvases."""
        width = int(stock_canvas_width(request, self.canvas_length))
        if load_option(request.sampling_params, "fits_canvases"):
            width = min(width, narrowed_width(request.max_tokens - request.num_output_tokens))
        return width

    def num_recomputed(self, num_known: int) -> int:
        """Returns how many of the `num_known` known tokens each step computes anew until their
        block is finished, because they see positions that may change."""
        return 0

    def is_partial_block(self, request: Request) -> bool:
        """Returns whether the current canvas of `request` shares its block with the prompt, so that
        the next canvas is wider."""
        return False

    def waits_for_first_token(self, num_known: int) -> bool:
        """Returns whether the canvas behind `num_known` known tokens must wait for the forward of
        the last known token, which predicts the canvas' first one."""
        return self.knows_first_token and num_known % self.canvas_length == 0

    def placeholders_after_block(self, request: Request, joins_commits: bool) -> list[int]:
        """Returns the draft placeholders of the next canvas, for a `request` that has just got a
        block and whose `spec_token_ids` are still the block's. Empty if the next step must first
        sample the canvas' first token. `joins_commits`: the next step prefills the block."""
        width = 0 if self.knows_first_token and joins_commits else self.canvas_width(request)
        return list(request.spec_token_ids[:width])

    def may_narrow(self, request: Request) -> bool:
        """Returns whether the canvas of a running request may be narrower than its placeholders."""
        left = request.max_tokens - request.num_output_tokens
        return self.fits_canvases and left < len(request.spec_token_ids)


class AlignedBlocks(CanvasFamily):
    """Canvases of models whose tokens see their whole block. Blocks are counted from the request's
    first token, so the first canvas may share its block with the prompt.

    If drafts are verified in a second copy of the block, a canvas is one block, and the places of
    the next one follow it for the copy (`step.masked.drafting_step`). Where the context has no room
    for these, the canvas goes without.
    """

    masked: MaskedConfig

    def canvas_width(self, request: Request) -> int:
        unit, width = self._unit(request), self.num_answer_tokens(request)
        room = int(self.vllm_config.model_config.max_model_len) - request.num_tokens - width
        return width + unit if self._has_copies(request) and unit <= room else width

    def num_answer_tokens(self, request: Request) -> int:
        unit = self._unit(request)
        return unit - int(request.num_tokens) % unit

    def num_recomputed(self, num_known: int) -> int:
        return num_known % self.masked.block_length

    def is_partial_block(self, request: Request) -> bool:
        return int(request.num_tokens) % self._unit(request) != 0

    def _has_copies(self, request: Request) -> bool:
        """Returns whether drafts of `request` are verified in a second copy of the block."""
        rule = load_option(request.sampling_params, "acceptance")
        return self.masked.verifies_copies and rule == "verified"

    def _unit(self, request: Request) -> int:
        """Returns at multiples of how many tokens canvases of `request` end."""
        return self.masked.block_length if self._has_copies(request) else self.canvas_length

    def placeholders_after_block(self, request: Request, joins_commits: bool) -> list[int]:
        if not request.spec_token_ids:  # preempted meanwhile: its tokens are prefilled first
            return []
        # The first canvas may have been narrower.
        return [-1] * (
            0 if self.knows_first_token and joins_commits else self.canvas_width(request)
        )

    def may_narrow(self, request: Request) -> bool:
        return True


def canvas_family(vllm_config: VllmConfig, canvas_length: int) -> CanvasFamily:
    """Returns the family of the served model. `canvas_length`: of served canvases, in tokens."""
    masked = MaskedConfig.if_masked(vllm_config)
    is_aligned = masked is not None and not masked.family.is_causal
    return (AlignedBlocks if is_aligned else CanvasFamily)(vllm_config, canvas_length, masked)

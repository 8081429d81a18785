"""vLLM's structured outputs: grammars for llguidance, admission, and the check of each block."""

from typing import Any

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from vllm.config import StructuredOutputsConfig
from vllm.sampling_params import StructuredOutputsParams, check_json_nesting
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import serialize_guidance_grammar
from vllm.v1.structured_output.request import get_structured_output_key

from vllm_dllm.compat.parsers import ReasoningEnds, open_reasoning

BACKEND = "guidance"
"""vLLM's name of llguidance."""


def grammar_kind_and_spec(wanted: StructuredOutputsParams) -> tuple[str, str]:
    """Returns the name of the structured-output field that a request sets (`json`, `regex`, ...)
    and its value as text. Raises ValueError if it sets none, as with `json_object: false`."""
    kind, spec = get_structured_output_key(wanted)
    return kind.name.lower(), spec


def serialize_grammar(wanted: StructuredOutputsParams, config: StructuredOutputsConfig) -> str:
    """Returns the grammar of a request as text for llguidance, as vLLM's own backend writes it.

    Raises:
        ValueError, KeyError, TypeError: the request's grammar is malformed.
    """
    kind, spec = get_structured_output_key(wanted)
    return serialize_guidance_grammar(
        kind, spec, config.disable_any_whitespace, config.disable_additional_properties
    )


def make_llguidance_tokenizer(tokenizer: Any, vocab_size: int) -> LLTokenizer:
    """Returns llguidance's form of `tokenizer`, with at least `vocab_size` tokens. Raises
    ValueError unless it is a fast tokenizer."""
    return from_tokenizer(tokenizer, max(vocab_size, len(tokenizer)))


def check_nesting(wanted: StructuredOutputsParams) -> None:
    """Raises VLLMValidationError if a request's schema or tag is nested deeper than vLLM allows."""
    check_json_nesting(wanted.json)
    check_json_nesting(wanted.structural_tag, structural_tag=True)


def use_guidance(wanted: StructuredOutputsParams) -> None:
    """Makes vLLM compile the grammar with llguidance: sets private fields of `wanted` in place."""
    wanted._backend, wanted._backend_was_auto = BACKEND, True


class BlockCheck:
    """Wraps vLLM's `StructuredOutputManager`, to check emitted blocks and no drafts."""

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def open_reasoning(self, request: Request) -> ReasoningEnds | None:
        """Returns how the reasoning before the grammar ends, see `parsers.open_reasoning`."""
        return open_reasoning(self._manager, request)

    def validate_tokens(self, request: Request, tokens: list[int]) -> list[int]:
        """Returns all draft `tokens`: a canvas that is being denoised need not be legal."""
        return tokens

    def accept_tokens(self, request: Request, tokens: list[int]) -> bool:
        """Returns whether an emitted block is legal, and advances the request's grammar over it.

        The block is checked up to its first stop token. vLLM's check takes a stop token other than
        the tokenizer's own for text, and what follows it under `ignore_eos` for a continuation.
        """
        if not request.use_structured_output or not tokens:
            return True
        grammar = request.structured_output_request.grammar
        if grammar.is_terminated():
            return True
        self._end_absent_reasoning(request, tokens)
        stops = {*request.sampling_params.all_stop_token_ids, grammar.ll_tokenizer.eos_token}
        end = next((i for i, token in enumerate(tokens) if token in stops), None)
        if not self._manager.accept_tokens(request, tokens[:end]):
            return False
        if end is None:
            return True
        matcher = grammar.ll_matcher
        grammar.terminated = matcher.is_accepting() or matcher.validate_tokens([tokens[end]]) == 1
        return grammar.terminated

    def _end_absent_reasoning(self, request: Request, tokens: list[int]) -> None:
        """Marks the reasoning of `request` as ended, in place, if the answer's first block does not
        begin with it. vLLM would wait for the end of reasoning."""
        if len(request.output_token_ids) > len(tokens):
            return
        ends = self.open_reasoning(request)
        if ends is not None and not ends.begins_open and tokens[0] not in ends.start_tokens:
            request.structured_output_request.reasoning_ended = True

"""vLLM's structured outputs: their text as llguidance takes it, their admission, and the check that
the scheduler makes of every block."""

from typing import Any

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from vllm.config import ModelConfig, StructuredOutputsConfig
from vllm.sampling_params import StructuredOutputsParams, check_json_nesting
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import serialize_guidance_grammar
from vllm.v1.structured_output.request import get_structured_output_key

from vllm_dllm.compat.parsers import Ends, open_reasoning

BACKEND = "guidance"
"""vLLM's name of llguidance."""


def kind_and_spec(wanted: StructuredOutputsParams) -> tuple[str, str]:
    """What a request asks for: the name of its field (`json`, `regex`, ...) and its text."""
    kind, spec = get_structured_output_key(wanted)
    return kind.name.lower(), spec


def grammar_text(wanted: StructuredOutputsParams, config: StructuredOutputsConfig) -> str:
    """What llguidance is told, as vLLM's own backend tells it.

    Raises:
        ValueError, KeyError, TypeError: it is malformed.
    """
    kind, spec = get_structured_output_key(wanted)
    return serialize_guidance_grammar(
        kind, spec, config.disable_any_whitespace, config.disable_additional_properties
    )


def tokenizer_of(model_config: ModelConfig) -> Any:
    """This process' tokenizer; a first call reads it."""
    return cached_tokenizer_from_config(model_config)


def llguidance_tokenizer(tokenizer: Any, vocab_size: int) -> LLTokenizer:
    """Raises ValueError unless it is one of the fast tokenizers."""
    return from_tokenizer(tokenizer, max(vocab_size, len(tokenizer)))


def check_nesting(wanted: StructuredOutputsParams) -> None:
    """Raises VLLMValidationError for a schema that is nested more deeply than vLLM takes."""
    check_json_nesting(wanted.json)
    check_json_nesting(wanted.structural_tag, structural_tag=True)


def use_guidance(wanted: StructuredOutputsParams) -> None:
    """Tells vLLM's scheduler which library compiles the grammar of its own."""
    wanted._backend, wanted._backend_was_auto = BACKEND, True


class BlockCheck:
    """vLLM's `StructuredOutputManager` as the scheduler of canvases asks it: whether the blocks
    that are emitted are legal, by a grammar of its own."""

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def open_reasoning(self, request: Request) -> Ends | None:
        return open_reasoning(self._manager, request)

    def validate_tokens(self, request: Request, tokens: list[int]) -> list[int]:
        """A canvas that is being denoised need not be legal."""
        return tokens

    def accept_tokens(self, request: Request, tokens: list[int]) -> bool:
        """vLLM's check takes a stop token for text unless it is the tokenizer's own, and what
        follows it, which `ignore_eos` allows, for a continuation."""
        if not request.use_structured_output or not tokens:
            return True
        grammar = request.structured_output_request.grammar
        if grammar.is_terminated():
            return True
        self._see_whether_it_thinks(request, tokens)
        stops = {*request.sampling_params.all_stop_token_ids, grammar.ll_tokenizer.eos_token}
        end = next((i for i, token in enumerate(tokens) if token in stops), None)
        if not self._manager.accept_tokens(request, tokens[:end]):
            return False
        if end is None:
            return True
        matcher = grammar.ll_matcher
        grammar.terminated = matcher.is_accepting() or matcher.validate_tokens([tokens[end]]) == 1
        return grammar.terminated

    def _see_whether_it_thinks(self, request: Request, tokens: list[int]) -> None:
        """vLLM waits for the end of reasoning that an answer may do without."""
        if len(request.output_token_ids) > len(tokens):
            return
        ends = self.open_reasoning(request)
        if ends is not None and not ends[3] and tokens[0] not in ends[2]:
            request.structured_output_request.reasoning_ended = True

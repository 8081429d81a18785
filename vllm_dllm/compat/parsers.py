"""What vLLM's parsers of reasoning know: which tokens end it, and what the prompt says of it."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from vllm.config import StructuredOutputsConfig
from vllm.parser.abstract_parser import DelegatingParser
from vllm.parser.engine.adapters import ParserEngineReasoningAdapter
from vllm.parser.engine.parser_engine_config import ParserState
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_dllm.compat.patching import patch


class PromptReadingParser(DelegatingParser):
    """Shows the prompt to its reasoning parser, which then reads the whole answer.

    vLLM's own class does so only for streams, and there skips the reasoning parser if the prompt
    has ended the reasoning: reasoning that comes nevertheless is then shown as the answer.
    """

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        """Tells the reasoning parser whether the prompt has begun the reasoning. vLLM calls it for
        answers that are not streamed."""
        super().set_prompt_token_ids(prompt_token_ids)
        assert self.reasoning_parser is not None
        self.reasoning_parser.adjust_initial_state_from_prompt(prompt_token_ids)

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        **options: Any,
    ) -> Any:
        """Returns what the next piece of a stream adds."""
        state = self._stream_state
        if prompt_token_ids is not None and not state.prompt_reasoning_checked:
            state.prompt_reasoning_checked = True
            self.set_prompt_token_ids(prompt_token_ids)
        return super().parse_delta(
            delta_text, delta_token_ids, request, prompt_token_ids, **options
        )


def show_prompts_to_parsers() -> None:
    """Patches vLLM to make a PromptReadingParser for reasoning parsers that have `reads_prompts`.
    Repeatable."""

    def make(stock: Any) -> Any:
        def get_parser(cls: Any, *args: Any, **kwargs: Any) -> Any:
            parser = stock.__func__(cls, *args, **kwargs)
            reasoning = parser and parser.reasoning_parser_cls
            if not getattr(reasoning, "reads_prompts", False):
                return parser
            return type(parser.__name__, (PromptReadingParser, parser), {})

        return classmethod(get_parser)

    patch("parser.parser_manager:ParserManager.get_parser", make)


class ReasoningEnds(NamedTuple):
    """Tokens around the reasoning that may come before an answer."""

    end_tokens: frozenset[int] = frozenset()
    """Tokens of which each ends the reasoning."""
    opening_tokens: frozenset[int] = frozenset()
    """Tokens among `end_tokens` that are also the answer's first token."""
    start_tokens: frozenset[int] = frozenset()
    """Tokens that start reasoning, of parsers that take text before them for the answer's."""
    begins_open: bool = True
    """Whether an answer begins as reasoning. If not, one of `start_tokens` may begin it."""


NO_REASONING_ENDS = ReasoningEnds()


def make_reasoning_parser(
    config: StructuredOutputsConfig, tokenizer: Any, kwargs: Mapping[str, Any] | None = None
) -> ReasoningParser | None:
    """Returns the server's reasoning parser. None if it has none, or if the grammar applies to
    reasoning as well. `kwargs`: passed to the parser's constructor, such as `chat_template_kwargs`.

    Raises:
        KeyError: no parser has the name that the server was given.
        RuntimeError, ValueError: the tokenizer lacks tokens that the parser needs.
    """
    if not config.reasoning_parser or config.enable_in_reasoning:
        return None
    if config.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(config.reasoning_parser_plugin)
    parser = ReasoningParserManager.get_reasoning_parser(config.reasoning_parser)
    return parser(tokenizer, **(kwargs or {}))


@lru_cache(maxsize=8)
def _added_tokens_and_one_of_text(tokenizer: Any) -> tuple[frozenset[int], int]:
    """Returns the ids of tokens added to the vocabulary, and the id of any token that was not."""
    added = frozenset(tokenizer.get_added_vocab().values())
    return added, next(token for token in tokenizer.get_vocab().values() if token not in added)


def find_reasoning_ends(parser: ReasoningParser) -> ReasoningEnds | None:
    """Returns which tokens end reasoning by `parser`. None: the parser takes everything for the
    answer. `NO_REASONING_ENDS`: no single token ends reasoning."""
    if isinstance(parser, ParserEngineReasoningAdapter):
        ends = parser.reasoning_end_token_ids
        opening = frozenset(end for end in ends if parser.find_reasoning_end([end]).implicit)
        start = parser.vocab.get(parser.reasoning_start_str or "")
        return ReasoningEnds(ends, opening, frozenset() if start is None else frozenset({start}))
    added, text = _added_tokens_and_one_of_text(parser.model_tokenizer)
    if parser.is_reasoning_end_streaming([text], [text]):
        return None
    # All of them, since vLLM's own check of a block asks the parser, too.
    ends = frozenset(end for end in added if parser.is_reasoning_end_streaming([end], [end]))
    return ReasoningEnds(ends)


def begins_in_reasoning(parser: ParserEngineReasoningAdapter) -> bool:
    """Whether an answer begins as reasoning, by the parser's current state. If not, it only is
    reasoning after a token that starts it."""
    return parser._parser_engine._engine.state is ParserState.REASONING


def open_reasoning(manager: StructuredOutputManager, request: Request) -> ReasoningEnds | None:
    """Returns which tokens end the reasoning before the grammar of `request` applies. None: it
    applies from the first token, or the parser knows no reasoning. `manager`: the scheduler's."""
    wanted = request.structured_output_request
    if wanted is None or manager._get_constraint_bounds(request, ()).constraint_start == 0:
        return None
    parser = manager._get_reasoner(request)
    assert parser is not None, "else the constraint starts at once"
    ends = find_reasoning_ends(parser)
    if not (ends and ends.start_tokens and isinstance(parser, ParserEngineReasoningAdapter)):
        return ends
    parser.adjust_initial_state_from_prompt(request.prompt_token_ids or ())
    return ends._replace(begins_open=begins_in_reasoning(parser))

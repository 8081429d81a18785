"""vLLM's parsers of answers: where ours are registered, by the names of `--tool-call-parser` and
`--reasoning-parser`, and which tokens end the reasoning before an answer."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from vllm.config import StructuredOutputsConfig
from vllm.parser.engine.adapters import ParserEngineReasoningAdapter
from vllm.parser.engine.parser_engine_config import ParserState
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_dllm.compat.patching import is_server

Ends = tuple[frozenset[int], frozenset[int], frozenset[int], bool]
"""Tokens that end reasoning, those of them that are the answer's first token, too, and those that
begin reasoning where a parser takes what comes before them for a part of the answer. Last, whether
an answer begins as reasoning; else it has none unless it begins with a token that does."""
NO_ENDS: Ends = (frozenset(), frozenset(), frozenset(), True)


def parser_of(
    config: StructuredOutputsConfig, tokenizer: Any, kwargs: Mapping[str, Any] | None = None
) -> ReasoningParser | None:
    """The one that is to end before a grammar begins; None: it begins at once.

    Raises:
        RuntimeError, ValueError: the tokenizer lacks tokens of its.
    """
    if not config.reasoning_parser or config.enable_in_reasoning:
        return None
    if config.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(config.reasoning_parser_plugin)
    parser = ReasoningParserManager.get_reasoning_parser(config.reasoning_parser)
    return parser(tokenizer, **(kwargs or {}))


@lru_cache(maxsize=8)
def _added_tokens_and_one_of_text(tokenizer: Any) -> tuple[frozenset[int], int]:
    """The tokens that were added to the vocabulary, as special ones are, and one that is text."""
    added = frozenset(tokenizer.get_added_vocab().values())
    return added, next(token for token in tokenizer.get_vocab().values() if token not in added)


def ends_of(parser: ReasoningParser) -> Ends | None:
    """Returns None if all is answer, as `parser` sees it, and `NO_ENDS` if no token alone ends its
    reasoning."""
    if isinstance(parser, ParserEngineReasoningAdapter):
        ends = parser.reasoning_end_token_ids
        opening = frozenset(end for end in ends if parser.find_reasoning_end([end]).implicit)
        begins = parser.vocab.get(parser.reasoning_start_str or "")
        return ends, opening, frozenset() if begins is None else frozenset({begins}), True
    added, text = _added_tokens_and_one_of_text(parser.model_tokenizer)
    if parser.is_reasoning_end_streaming([text], [text]):
        return None
    # All that does, since vLLM's own check of a block asks the parser, too.
    ends = frozenset(end for end in added if parser.is_reasoning_end_streaming([end], [end]))
    return ends, frozenset(), frozenset(), True


def is_open(parser: ParserEngineReasoningAdapter) -> bool:
    """Whether an answer begins as reasoning; else it is one, unless a token opens reasoning."""
    return parser._parser_engine._engine.state is ParserState.REASONING


def open_reasoning(manager: StructuredOutputManager, request: Request) -> Ends | None:
    """How the reasoning ends that comes before the form of `request`'s answer; None: none does."""
    wanted = request.structured_output_request
    if wanted is None or manager._get_constraint_bounds(request, ()).constraint_start == 0:
        return None
    parser = manager._get_reasoner(request)
    assert parser is not None, "else the constraint starts at once"
    ends = ends_of(parser)
    if ends is None or not ends[2] or not isinstance(parser, ParserEngineReasoningAdapter):
        return ends
    parser.adjust_initial_state_from_prompt(request.prompt_token_ids or ())
    return *ends[:3], is_open(parser)


Parser = tuple[str, str, str]
"""Its name in the register, its module and its class."""


def register_parsers(tool_parser: Parser, reasoning_parser: Parser) -> None:
    """Loaded when a server asks for them. Nothing in a process that is no server: what vLLM imports
    for its registers takes a second. Repeatable."""
    if is_server():
        from vllm.tool_parsers import ToolParserManager

        ToolParserManager.register_lazy_module(*tool_parser)
        ReasoningParserManager.register_lazy_module(*reasoning_parser)

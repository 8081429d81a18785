"""Admission of structured outputs: is there an answer of this form, and does it fit?"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from vllm.config import StructuredOutputsConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from vllm_dllm.compat.grammar import (
    BACKEND,
    check_nesting,
    grammar_kind_and_spec,
    make_llguidance_tokenizer,
    serialize_grammar,
    use_guidance,
)
from vllm_dllm.compat.parsers import (
    NO_REASONING_ENDS,
    ReasoningEnds,
    find_reasoning_ends,
    make_reasoning_parser,
)
from vllm_dllm.grammar.closing import shortest_known, surely_has_none
from vllm_dllm.grammar.compile import GrammarError, Grammars, check_schema, check_size
from vllm_dllm.grammar.exclusions import Exclusions
from vllm_dllm.grammar.patterns import mend_patterns
from vllm_dllm.grammar.reasoning import Reasoning
from vllm_dllm.grammar.vocabulary import GrammarVocabulary
from vllm_dllm.requests.structural_tag import to_lark

_NO_STOPS: frozenset[int] = frozenset()


@lru_cache(maxsize=8)
def grammars_of(tokenizer: Any, vocab_size: int) -> Grammars:
    """Returns this process' grammars. Raises ValueError unless the tokenizer is one of the fast
    ones."""
    return Grammars(GrammarVocabulary(make_llguidance_tokenizer(tokenizer, vocab_size)))


def check_structured_outputs(
    params: SamplingParams,
    config: StructuredOutputsConfig,
    tokenizer: Any,
    vocab_size: int,
    max_model_len: int,
    *,
    is_constrained: bool = False,  # to its logprob_token_ids
) -> None:
    """Admission check of a request with structured outputs, whose bad words are tokens by now. May
    put a grammar in the place of a structural tag, and another schema in that of one with patterns.

    Raises:
        VLLMValidationError: becomes HTTP 400; names the field, and what is wrong where.
    """
    _check_settings(config, tokenizer)
    reasoning = _reasoning_before(config, tokenizer)
    assert params.structured_outputs is not None
    check_nesting(params.structured_outputs)
    kind, spec = _kind_and_spec(params)
    # Whoever asks for calls does not send the tag that the tool parser makes of them.
    name = "tools" if '"gemma4_calls"' in spec else f"structured_outputs.{kind}"
    try:
        check_size(kind, spec)
        if kind == "choice" and not json.loads(spec):
            raise GrammarError("it must have a choice, got none")
        if kind == "json":
            check_schema(schema := json.loads(spec))
            if (mended := mend_patterns(schema)) != schema:
                params.structured_outputs = replace(params.structured_outputs, json=mended)
        if kind == "structural_tag":
            check_schema(tag := json.loads(spec))
            params.structured_outputs = StructuredOutputsParams(grammar=to_lark(mend_patterns(tag)))
        text = serialize_grammar(params.structured_outputs, config)
        grammars = grammars_of(tokenizer, vocab_size)
        exclusions = exclusions_of(params, is_constrained, grammars.vocabulary.size)
        if exclusions is None:
            needed = _fewest_of_all_tokens(
                grammars, text, max_model_len, params.min_tokens, reasoning
            )
        else:
            _check_ends(params, exclusions, grammars.vocabulary.tokenizer.eos_token)
            needed = _fewest_tokens(
                grammars, text, max_model_len, params.min_tokens, reasoning, exclusions
            )
    except KeyError as error:
        raise _refusal(f"{name} lacks the key {error}") from error
    except (ValueError, TypeError) as error:
        is_schema = kind == "json" and not isinstance(error, json.JSONDecodeError)
        place = _where_in_schema(spec, str(error)) if is_schema else ""
        complaint = " ".join(str(error).split())
        raise _refusal(f"{name} cannot be used: {complaint}{place}") from error
    use_guidance(params.structured_outputs)
    most = min(params.max_tokens or max_model_len, max_model_len)
    if needed > most:
        raise VLLMValidationError(
            f"max_tokens must be at least {needed} for an answer of the form of "
            f"{name}{' and the end of reasoning' if reasoning else ''}, got "
            f"{most}. Raise it.",
            parameter="max_tokens",
        )


def exclusions_of(
    params: SamplingParams, is_constrained: bool, vocab_size: int
) -> Exclusions | None:
    """What a request excludes, whose bad words are tokens by now; None: nothing."""
    allowed = params.allowed_token_ids
    if is_constrained:
        allowed = params.logprob_token_ids
    words = params.bad_words_token_ids
    if not allowed and not words:
        return None
    known = range(vocab_size)
    return Exclusions(
        vocab_size,
        frozenset(token for token in allowed if token in known) if allowed else None,
        frozenset(tuple(word) for word in words or () if all(token in known for token in word)),
    )


def _check_ends(params: SamplingParams, exclusions: Exclusions, eos: int) -> None:
    """Raises GrammarError if they leave nothing that ends an answer."""
    ends = {eos, *(() if params.ignore_eos else params.stop_token_ids or ())}
    if all(exclusions.excludes(end, ()) for end in ends):
        raise GrammarError(
            f"the request excludes every token that ends an answer, such as {eos}. Allow one in "
            "allowed_token_ids (logprob_token_ids, if diffusion_constrained is set) and bad_words"
        )


def _check_settings(config: StructuredOutputsConfig, tokenizer: Any) -> None:
    """Checks the server's settings."""
    if config.backend not in ("auto", BACKEND):
        raise _refusal(
            f"structured outputs of a diffusion model need the backend '{BACKEND}', and this "
            f"server was started with '{config.backend}'. Start it with "
            f"--structured-outputs-config.backend auto, or leave them out"
        )
    if tokenizer is None:
        raise _refusal("structured outputs need a tokenizer, and skip_tokenizer_init leaves it out")


@lru_cache(maxsize=8)
def _ends_of_reasoning(name: str, plugin: str, tokenizer: Any) -> ReasoningEnds | None:
    config = StructuredOutputsConfig(reasoning_parser=name, reasoning_parser_plugin=plugin)
    parser = make_reasoning_parser(config, tokenizer)
    assert parser is not None
    return find_reasoning_ends(parser)


def _reasoning_before(config: StructuredOutputsConfig, tokenizer: Any) -> Reasoning | None:
    """What may come before the form of an answer: whether it does is the prompt's matter, which is
    not known here."""
    name = config.reasoning_parser
    if not name or config.enable_in_reasoning:
        return None
    ends = _ends_of_reasoning(name, config.reasoning_parser_plugin, tokenizer)
    if ends == NO_REASONING_ENDS:
        raise _refusal(
            "structured outputs of a diffusion model need a reasoning parser whose reasoning ends "
            f"with one token, and this server has --reasoning-parser {name}. Start it with another "
            "one, or leave structured outputs out"
        )
    return None if ends is None else Reasoning(*ends)


def _kind_and_spec(params: SamplingParams) -> tuple[str, str]:
    assert params.structured_outputs is not None
    try:
        return grammar_kind_and_spec(params.structured_outputs)
    except ValueError as error:  # json_object is False
        raise _refusal("structured_outputs.json_object must be true, or be left out") from error


def _fewest_tokens(
    grammars: Grammars,
    text: str,
    most: int,
    min_tokens: int,
    reasoning: Reasoning | None,
    exclusions: Exclusions | None,
) -> int:
    """Counts the shortest answer that is known; 0 if no search finds one, and yet there may be one.

    Raises:
        GrammarError: there is none, or none is found without what the request excludes.
    """
    start = grammars.start(text, _NO_STOPS, exclusions, min_tokens, reasoning)
    tokens = shortest_known(start, most)
    if tokens is None and exclusions is None and not surely_has_none(start, most):
        return 0
    if tokens is None:
        excluded = "" if exclusions is None else " without the tokens that the request excludes"
        raise GrammarError(f"no answer of at most {most} tokens was found{excluded}. Simplify it")
    return len(tokens)


@lru_cache(maxsize=1024)
def _fewest_of_all_tokens(
    grammars: Grammars, text: str, most: int, min_tokens: int, reasoning: Reasoning | None
) -> int:
    """Nothing is kept of requests that exclude tokens: their lists may be as long as the
    vocabulary."""
    return _fewest_tokens(grammars, text, most, min_tokens, reasoning, None)


def _refusal(message: str) -> VLLMValidationError:
    return VLLMValidationError(f"{message}.", parameter="structured_outputs")


def _where_in_schema(spec: str, complaint: str) -> str:
    """Where in a JSON schema the first key or word stands that llguidance complains about."""
    quoted = complaint.split('"')[1::2] or complaint.split()[-1:]
    for path, word in _words(json.loads(spec)):
        if word in quoted:
            return f" (at {path})"
    return ""


def _words(schema: Any, path: str = "#") -> Iterator[tuple[str, str]]:
    """JSON pointers, and the key or the text that stands there."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            yield f"{path}/{key}", key
            yield from _words(value, f"{path}/{key}")
    elif isinstance(schema, list):
        for i, value in enumerate(schema):
            yield from _words(value, f"{path}/{i}")
    elif isinstance(schema, str):
        yield path, schema

"""Admits structured outputs: checks that an answer of the wanted form exists, and fits into the
tokens that the request may get."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from vllm.config import StructuredOutputsConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from vllm_dllm.compat import parsers
from vllm_dllm.compat.grammar import (
    BACKEND,
    check_nesting,
    grammar_kind_and_spec,
    make_llguidance_tokenizer,
    serialize_grammar,
    use_guidance,
)
from vllm_dllm.grammar.compiler import (
    GrammarCompiler,
    GrammarError,
    check_grammar_size,
    check_joined_patterns,
    check_lark,
    check_schema_size,
)
from vllm_dllm.grammar.completion import certainly_has_no_completion, find_shortest_completion
from vllm_dllm.grammar.masks import Exclusions
from vllm_dllm.grammar.patterns import mend_patterns
from vllm_dllm.grammar.state import Reasoning
from vllm_dllm.grammar.vocabulary import GrammarVocabulary
from vllm_dllm.requests.structural_tag import structural_tag_to_lark

_NO_STOPS: frozenset[int] = frozenset()


@lru_cache(maxsize=8)
def grammar_compiler(tokenizer: Any, vocab_size: int) -> GrammarCompiler:
    """Returns this process' compiler of grammars for a tokenizer; the same one for equal arguments.
    Raises ValueError unless the tokenizer is a fast one."""
    return GrammarCompiler(GrammarVocabulary(make_llguidance_tokenizer(tokenizer, vocab_size)))


def check_structured_outputs(
    params: SamplingParams,
    config: StructuredOutputsConfig,
    tokenizer: Any,
    vocab_size: int,
    max_model_len: int,
    *,
    is_constrained: bool = False,  # whether the answer may only have its logprob_token_ids
) -> None:
    """Checks a request with structured outputs, once its bad words are tokens. Changes
    `params.structured_outputs`: replaces a structural tag by a grammar, and a JSON schema by one
    with mended patterns, as text. Has vLLM use llguidance. Raises VLLMValidationError, which
    becomes HTTP 400; it names the field, what is wrong, and where."""
    if config.backend not in ("auto", BACKEND):
        raise _refusal(
            f"structured outputs of a diffusion model need the backend '{BACKEND}', and this "
            f"server was started with '{config.backend}'. Start it with "
            f"--structured-outputs-config.backend auto, or leave them out"
        )
    if tokenizer is None:
        raise _refusal("structured outputs need a tokenizer, and skip_tokenizer_init leaves it out")
    reasoning = _reasoning_of_server(config, tokenizer)
    assert params.structured_outputs is not None
    check_nesting(params.structured_outputs)
    kind, spec = _kind_and_spec(params)
    # The tool parser has written this tag, not the client.
    name = "tools" if '"gemma4_calls"' in spec else f"structured_outputs.{kind}"
    try:
        params.structured_outputs = _check_and_mend(params.structured_outputs, kind, spec)
        text = serialize_grammar(params.structured_outputs, config)
        grammars = grammar_compiler(tokenizer, vocab_size)
        exclusions = parse_exclusions(params, is_constrained, grammars.vocabulary.size)
        if exclusions is not None:
            _check_end_is_allowed(params, exclusions, grammars.vocabulary.tokenizer.eos_token)
        count = _count_fewest_tokens_once if exclusions is None else _count_fewest_tokens
        needed = count(grammars, text, max_model_len, params.min_tokens, reasoning, exclusions)
    except KeyError as error:
        raise _refusal(f"{name} lacks the key {error}") from error
    except (ValueError, TypeError) as error:
        is_schema = kind == "json" and not isinstance(error, json.JSONDecodeError)
        place = _locate_complaint(spec, str(error)) if is_schema else ""
        complaint = " ".join(str(error).split())
        raise _refusal(f"{name} cannot be used: {complaint}{place}") from error
    use_guidance(params.structured_outputs)
    most = min(params.max_tokens or max_model_len, max_model_len)
    if needed > most:
        raise VLLMValidationError(
            f"max_tokens must be at least {needed} for an answer of the form of {name}"
            f"{' and the end of reasoning' if reasoning else ''}, got {most}. Raise it.",
            parameter="max_tokens",
        )


def _check_and_mend(
    wanted: StructuredOutputsParams, kind: str, spec: str
) -> StructuredOutputsParams:
    """Returns the structured outputs for llguidance: with a grammar in the place of a structural
    tag, and with a JSON schema as text, with mended patterns. `kind` and `spec` are what
    `_kind_and_spec` returns. Raises ValueError, KeyError or TypeError if the grammar is too large,
    or malformed."""
    check_grammar_size(kind, spec)
    if kind == "choice" and not json.loads(spec):
        raise GrammarError("it must have a choice, got none")
    if kind == "grammar":
        check_lark(spec)
    if kind not in ("json", "structural_tag"):
        return wanted
    schema = json.loads(spec)
    check_schema_size(schema)
    check_joined_patterns(schema)
    mended = mend_patterns(schema)
    if kind == "structural_tag":
        return StructuredOutputsParams(grammar=structural_tag_to_lark(mended))
    if mended == schema and isinstance(wanted.json, str):
        return wanted
    # As text: JSON's integers may need more than the 64 bits of those in messages to the engine.
    return replace(wanted, json=json.dumps(mended))


def _check_end_is_allowed(params: SamplingParams, exclusions: Exclusions, eos: int) -> None:
    """Raises GrammarError if a request excludes all tokens that could end its answer."""
    ends = {eos, *(params.stop_token_ids or ())}
    if all(exclusions.excludes(end, ()) for end in ends):
        raise GrammarError(
            f"the request excludes every token that ends an answer, such as {eos}. Allow one in "
            "allowed_token_ids (logprob_token_ids, if diffusion_constrained is set) and bad_words"
        )


def parse_exclusions(
    params: SamplingParams, is_constrained: bool, vocab_size: int
) -> Exclusions | None:
    """Returns the tokens that a request excludes, once its bad words are tokens; None if it
    excludes no tokens. With `is_constrained` it allows only its `logprob_token_ids`."""
    allowed = params.logprob_token_ids if is_constrained else params.allowed_token_ids
    words = params.bad_words_token_ids
    if not allowed and not words:
        return None
    known = range(vocab_size)
    return Exclusions(
        vocab_size,
        frozenset(token for token in allowed if token in known) if allowed else None,
        frozenset(tuple(word) for word in words or () if all(token in known for token in word)),
    )


@lru_cache(maxsize=8)
def _reasoning_ends(name: str, plugin: str, tokenizer: Any) -> parsers.ReasoningEnds | None:
    """Returns the tokens around the reasoning of the reasoning parser `name`, from the file
    `plugin` if it is not "". Cached. None: the parser takes everything for the answer."""
    config = StructuredOutputsConfig(reasoning_parser=name, reasoning_parser_plugin=plugin)
    parser = parsers.make_reasoning_parser(config, tokenizer)
    assert parser is not None
    return parsers.find_reasoning_ends(parser)


def _reasoning_of_server(config: StructuredOutputsConfig, tokenizer: Any) -> Reasoning | None:
    """Returns the reasoning that may come before an answer's form, by the server's reasoning
    parser; None if the form begins at once. It is not known here whether the prompt opens the
    reasoning. Raises VLLMValidationError if no single token ends the parser's reasoning."""
    name = config.reasoning_parser
    if not name or config.enable_in_reasoning:
        return None
    ends = _reasoning_ends(name, config.reasoning_parser_plugin, tokenizer)
    if ends == parsers.NO_REASONING_ENDS:
        raise _refusal(
            "structured outputs of a diffusion model need a reasoning parser whose reasoning ends "
            f"with one token, and this server has --reasoning-parser {name}. Start it with another "
            "one, or leave structured outputs out"
        )
    return None if ends is None else Reasoning(*ends)


def _kind_and_spec(params: SamplingParams) -> tuple[str, str]:
    """Returns the field of the structured outputs that is set, such as "json", and its value as
    text. Raises VLLMValidationError if none is set."""
    assert params.structured_outputs is not None
    try:
        return grammar_kind_and_spec(params.structured_outputs)
    except ValueError as error:  # json_object is False
        raise _refusal("structured_outputs.json_object must be true, or be left out") from error


def _count_fewest_tokens(
    grammars: GrammarCompiler,
    text: str,
    most: int,
    min_tokens: int,
    reasoning: Reasoning | None,
    exclusions: Exclusions | None,
) -> int:
    """Returns the number of tokens of the shortest answer that is found. Returns 0 if none is found
    but there may be one. Raises GrammarError if no answer has at most `most` tokens, or none is
    found without the tokens that the request excludes."""
    start = grammars.start_state(text, _NO_STOPS, exclusions, min_tokens, reasoning)
    tokens = find_shortest_completion(start, most)
    if tokens is None and exclusions is None and not certainly_has_no_completion(start, most):
        return 0
    if tokens is None:
        excluded = "" if exclusions is None else " without the tokens that the request excludes"
        raise GrammarError(f"no answer of at most {most} tokens was found{excluded}. Simplify it")
    return len(tokens)


_count_fewest_tokens_once = lru_cache(maxsize=1024)(_count_fewest_tokens)
"""Returns what `_count_fewest_tokens` returns, cached by the arguments. Only for requests without
exclusions: these may be as long as the vocabulary, too long to be cached."""


def _refusal(message: str) -> VLLMValidationError:
    """Returns the error for a request's structured outputs. Does not raise it."""
    return VLLMValidationError(f"{message}.", parameter="structured_outputs")


def _locate_complaint(spec: str, complaint: str) -> str:
    """Returns the place in a JSON schema that llguidance complains of, as " (at #/...)"; "" if it
    is not found. It is the first key or text that the complaint has in double quotes. If the
    complaint quotes nothing, it is the first that is the complaint's last word."""
    quoted = complaint.split('"')[1::2] or complaint.split()[-1:]
    for path, text in _keys_and_texts(json.loads(spec)):
        if text in quoted:
            return f" (at {path})"
    return ""


def _keys_and_texts(schema: Any, path: str = "#") -> Iterator[tuple[str, str]]:
    """Yields the JSON pointer of each key and each text in a schema, and the key or text itself."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            yield f"{path}/{key}", key
            yield from _keys_and_texts(value, f"{path}/{key}")
    elif isinstance(schema, list):
        for i, value in enumerate(schema):
            yield from _keys_and_texts(value, f"{path}/{i}")
    elif isinstance(schema, str):
        yield path, schema

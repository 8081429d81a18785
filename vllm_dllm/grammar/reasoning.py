"""Describes the reasoning before an answer that has a form: free text, up to a token that ends
it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Reasoning:
    """Names the tokens that begin and end a model's reasoning."""

    ends: frozenset[int]
    """Tokens each of which ends the reasoning."""
    opening: frozenset[int] = frozenset()
    """The tokens of `ends` that are also the first token of the answer, such as one that begins a
    tool call."""
    begins: frozenset[int] = frozenset()
    """Tokens that begin the reasoning. Only the first token of all may be one of them: a parser
    would count text before it as a part of the answer, and that text has no form."""
    is_open: bool = True
    """Whether the prompt has already begun the reasoning. If not, a first token of `begins` begins
    it; any other first token belongs to the answer."""

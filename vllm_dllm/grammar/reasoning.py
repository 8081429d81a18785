"""What comes before an answer that has a form: free text, up to a token that ends it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Reasoning:
    ends: frozenset[int]
    """Tokens, each of which ends it wherever it stands."""
    opening: frozenset[int] = frozenset()
    """Those of them that are the answer's first token, too, such as one that begins a tool call."""
    begins: frozenset[int] = frozenset()
    """Tokens that begin it, which only the first token of all may be: a parser takes what comes
    before them for a part of the answer, and that has no form."""
    is_open: bool = True
    """Whether the answer begins in it. If not, one of `begins` may open it; any other first token
    is the answer's own."""

"""Answers of Gemma 4, read in one piece."""

from vllm_dllm.requests.gemma_reader import Call, GemmaReader


def read_whole_answer(text: str) -> tuple[str, list[Call]]:
    """Returns the text around the calls of a whole answer, and the calls."""
    reader = GemmaReader()
    around, calls = reader.read_piece(text)
    return around + reader.finish(), calls

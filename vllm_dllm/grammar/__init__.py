"""Structured outputs: replaces the best guesses of a canvas so that the answer fits its grammar.

The model predicts every position of a canvas again in each step, so only the emitted tokens must be
legal. In each step `canvas.py` finds a legal path through the rows, and cuts it where the answer
can still be completed:

- `walk.py` goes along the best guesses and repairs what the grammar rejects. Where that is
  improbable, `path_search.py` looks for a better path, first best-first, then by a beam.
- `completion.py` searches for completions.
- `reveal_run` does both for masked models, whose tokens stay once they are revealed.

`state.py` is an answer's place in its grammar, and `compiler.py` makes the first one. There is no
engine in here, and no tensor of a device: predictions come as NumPy arrays.

Legend: L = rows of a canvas, K = most probable tokens of each row, V = vocabulary size,
W = ceil(V / 32) words of a mask, whose bit `t % 32` of word `t // 32` is 1 if token t is legal.
"""

"""Grammars on a canvas: which tokens of it are emitted, so that an answer always has its form.

A canvas of uniform noise decides every position anew in each step, so only what is emitted must be
legal. Each step walks the grammar along the best guess and repairs what it rejects; the path `g`
takes the guess' place. No engine and no tensors of a device in here: token ids and
log-probabilities of the most probable tokens come as NumPy arrays.

Legend: L = rows of a canvas, K = most probable tokens of each row, V = vocabulary size,
W = ceil(V / 32) words of a mask, whose bit `t % 32` of word `t // 32` is 1 if token t is legal.
"""

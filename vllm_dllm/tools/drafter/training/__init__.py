"""Makes drafters: the reference in PyTorch, the target's answers, training, evaluation."""

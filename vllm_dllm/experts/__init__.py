"""Mixtures of experts: the definition, and Triton. No engine."""

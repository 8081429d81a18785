"""Mixtures of experts that have few rows each: the definition, and Triton. No engine."""

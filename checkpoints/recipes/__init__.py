"""Small DiffusionGemma checkpoints: random ones for tests, and the trained one we ship."""

"""The small DiffusionGemma that sees: drawn pictures, questions about them, and its training."""

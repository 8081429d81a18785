"""Command-line tools: what no server imports."""

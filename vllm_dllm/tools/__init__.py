"""Command-line tools; no server imports them."""

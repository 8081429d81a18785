"""Steps of blocks of masks."""

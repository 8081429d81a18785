"""What a client may ask of a diffusion model, and where its answer ends."""

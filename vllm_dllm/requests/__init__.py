"""Requests: checks what a client asks of a diffusion model, and finds where its answer ends."""

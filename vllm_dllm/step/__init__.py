"""One step of the worker: denoises or commits the canvases of all its requests at once."""

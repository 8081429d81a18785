"""What a server counts of its canvases, from the worker by way of the engine to `/metrics`; and of
its drafts, which vLLM counts."""

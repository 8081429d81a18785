"""Metrics of canvases, counted by the worker and the engine and shown on `/metrics`; and of drafts,
which vLLM counts."""

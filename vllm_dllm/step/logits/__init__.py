"""The logits of a step's canvases: what requests make of them, and what is read of them."""

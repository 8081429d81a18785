"""What requests ask of logits, and of the canvases that are read from them."""

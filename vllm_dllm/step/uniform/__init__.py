"""How a canvas goes through a step, and the steps of canvases that begin as noise."""

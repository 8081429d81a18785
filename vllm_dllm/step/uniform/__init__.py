"""The steps of canvases that begin as noise."""

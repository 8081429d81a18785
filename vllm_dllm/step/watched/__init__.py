"""What is watched and counted of canvases."""

"""The engine process: which canvases a step holds, and which forwards are saved."""

"""How the processes of a server start, and that none outlives its parent. No vLLM."""

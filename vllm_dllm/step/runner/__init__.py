"""What vLLM's model runner and worker ask of us, answered by the step."""

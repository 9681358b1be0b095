"""A real language model on a CPU: SmolLM2-135M-Instruct, as a smoke run."""

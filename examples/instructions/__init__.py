"""A real small language model learns to do what it is told: SmolLM2-135M-Instruct with LoRA."""

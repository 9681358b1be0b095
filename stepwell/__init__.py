"""Stepwell: point any agent's `base_url` at it and get a better model."""

"""Tinker as the trainer: weights and optimizer at a service, the loss here (`backend.py`)."""

"""Agents and presets to copy from. Nothing in Stepwell imports this package."""

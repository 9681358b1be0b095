"""Agents to copy, each in one file."""

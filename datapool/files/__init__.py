"""Trajectories in files: archive, export, import, deletion."""

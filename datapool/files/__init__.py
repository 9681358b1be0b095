"""Trajectories in files: export, import, deletion."""

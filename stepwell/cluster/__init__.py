"""Ray, and the parts of a run on it."""

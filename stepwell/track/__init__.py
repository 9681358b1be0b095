"""Reports of a run: console, trackers and summary."""

"""What a run tells of itself: console, trackers, summary."""

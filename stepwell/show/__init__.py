"""Everything that looks into a run."""

"""A service whose traffic trains its model."""

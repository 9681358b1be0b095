"""A run's configuration: sections, files, keys, errors."""

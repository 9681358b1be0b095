"""A regular package: verl installs a `tests` of its own, which would win over a mere folder."""

"""The `stepwell` command."""

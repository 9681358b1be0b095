"""Reading what the pool holds and what happened in it."""

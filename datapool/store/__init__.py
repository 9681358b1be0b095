"""The pool's memory across restarts."""

"""The pool in a process of its own, and the way to it."""

"""The pool's state machine: pure, synchronous, without Ray, I/O or clock."""

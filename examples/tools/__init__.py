"""Tools for white-box agents: a calculator, search over a local corpus, Python in a sandbox."""

"""Weight publication: versions on disk, and one transaction over all engine replicas.

    WeightStore(folder, keep=2)     write(version, save) -> path, commit(version), current()
    publish(engines, path, version, mode, store=, transport=) -> Publication

`store.py` versions on disk and the lock · `transaction.py` the transaction · `transports.py` how
the weights get there · `collective.py` process groups and serialised tensors · `digest.py` which
bytes were meant. Importing it loads no torch: engines are supervised by processes that need none.
"""

from stepwell.backends.weights.store import (
    Published,
    StoreLock,
    WeightStore,
    check_version,
    read_current,
)
from stepwell.backends.weights.transaction import Publication, publish

__all__ = [
    "Publication",
    "Published",
    "StoreLock",
    "WeightStore",
    "check_version",
    "publish",
    "read_current",
]

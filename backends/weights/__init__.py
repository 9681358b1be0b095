"""Weight publication: versions on disk, and one transaction over all engine replicas.

    WeightStore(folder, keep=2)     write(version, save) -> path, commit(version), current()
    publish(engines, path, version, mode, store=, transport=) -> Publication

`store.py` versions on disk and the lock · `transaction.py` the transaction · `transports.py` how
the weights get there · `sender.py` rank 0's end of it · `buckets.py` flat bytes · `collective.py`
process groups · `ipc.py` shared memory · `delta.py` what changed · `digest.py` which bytes were
meant. Importing it loads no torch: engines are supervised by processes that need none.
"""

from stepwell.backends.weights.store import (
    Published,
    StoreLock,
    WeightStore,
    check_version,
    read_current,
)
from stepwell.backends.weights.transaction import Publication, publish
from stepwell.backends.weights.transports import Transport, build_transport, stored_transport

__all__ = [
    "Publication",
    "Published",
    "StoreLock",
    "Transport",
    "WeightStore",
    "build_transport",
    "check_version",
    "publish",
    "read_current",
    "stored_transport",
]

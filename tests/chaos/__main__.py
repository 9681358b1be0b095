"""`python -m tests.chaos NAME [--json] [options]`: break something, and check that nothing is lost.

Without a name it lists what is broken. `python -m tests.chaos NAME --help` has the options of one.

Exit codes: 0 everything holds; 1 something does not; 2 the command line is wrong; 130 interrupted.
"""

from __future__ import annotations

import sys

from benchmarks.command import main

FAULTS = {
    "runs": "a run's parts, disks, leases, machines, journal fail 89 times",
    "planted": "deliberate faults of the product, which must be noticed",
    "pool-kills": "kill -9 of the pool under load: nothing is lost",
    "pool-starvation": "what hanging rollouts do to other groups",
    "publication-kills": "engines killed while weights are published",
    "weight-updates": "weight updates with requests in flight",
    "live": "traffic trains its model; trainer and archivers are killed",
    "journal-damage": "bits flipped and files cut in journals and checkpoints",
    "artefact-damage": "bits flipped in each other file that is read again",
}

if __name__ == "__main__":
    sys.exit(main("tests.chaos", FAULTS, __doc__))

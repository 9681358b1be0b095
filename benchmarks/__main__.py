"""`python -m benchmarks NAME [--json] [options]`: run a benchmark and check its bounds.

Without a name it lists the benchmarks. `python -m benchmarks NAME --help` has the options of one.
Timing is compared only as a ratio within one run: the machine may be shared and noisy. What is
killed, stopped and damaged is in `python -m tests.chaos`.

Exit codes: 0 every bound holds; 1 one does not; 2 the command line is wrong; 130 interrupted.
"""

from __future__ import annotations

import sys

from benchmarks.command import main

BENCHES = {
    "gateway": "requests, latency, CPU and memory, beside other gateways",
    "pool": "steps/s, latency and memory, beside other stores",
    "trainer": "tokens/s and memory of a step by row form, beside TRL",
    "publication": "how long an engine is paused for new weights, by transport",
    "idle": "CPU of pool, gateway and trainer while nobody calls",
    "overlap": "generation and training at once, by one after the other",
    "ui": "the dashboard over 1,000,000 steps, and what it costs",
    "archive": "a pool and a gateway with the archive by without; its bytes",
    "catalogue": "pages of the archive at 1,000,000 trajectories",
    "tasks": "what the tasks in examples/ teach their models",
    "lag": "score by lag and off-policy method: many quickstarts, hours",
    "scale": "first bottleneck at 100, 1,000, 10,000 agents, simulated",
    "path": "functions, files, types of a turn and two optimizer steps",
    "size": "lines, public names and configuration keys, by room",
}

if __name__ == "__main__":
    sys.exit(main("benchmarks", BENCHES, __doc__))

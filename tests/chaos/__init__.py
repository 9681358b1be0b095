"""Chaos: one harness that kills, stops and damages, and audits what is left.

python -m tests.chaos NAME [--json]       NAME --help has the options of each

A module has `async def run(…) -> BenchResult`; what it checks must be 0, or the exit code is 1.

runs              training runs under random faults, checked against a log that the agents write
    agent.py      what the run trains: it writes down every answer that it got and every reward
    faults.py     what is done to the run: kills, stops, full disks, in an order that a seed gives
    lives.py      the run under fire: one life of the command after another, on one machine or two
    verify.py     compares the log with what was trained, the ledger, the pool and the weights
    scenarios.py  which faults meet which run
    attached.py   a service, clients with a log of their own, a trainer that is attached; salvage
planted           deliberate faults of the product (plants.py), which verify.py must notice
pool-kills        the pool's actor killed under load; pool-starvation: rollouts that hang
publication-kills engines killed while weights are published; weight-updates: calls in flight
live              a service's traffic trains its model, and the trainer is killed
journal-damage    flipped bits and cut files in a journal; artefact-damage: in all other files
"""

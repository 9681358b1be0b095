"""Chaos: training runs under random faults, checked against a log that the agents write.

python -m tests.chaos --seed 7 [--only machine] [--faults 12] [--json]

agent.py       what the run trains: it writes down every answer that it got and every reward
faults.py      what is done to the run: kills, stops, full disks, in an order that a seed gives
lives.py       the run under fire: one life of the command after another, on one machine or two
verify.py      compares the log with what was trained, with the ledger, the pool and the weights
scenarios.py   which faults meet which run
attached.py    a service, clients with a log of their own, a trainer that is attached; salvage
plants.py      deliberate faults of the product, which verify.py must notice; run_plants.py
"""

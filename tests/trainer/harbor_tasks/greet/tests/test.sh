#!/bin/bash
mkdir -p /logs/verifier
if bash /tests/check.sh; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi

#!/bin/bash
score=0
test "$(cat /app/count.txt 2>/dev/null)" = 3 && score=0.75
echo "{\"reward\": $score, \"lines\": 3}" > /logs/verifier/reward.json

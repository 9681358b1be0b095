grep -q "$GREETING" /app/greeting.txt && test -f /app/data/name.txt

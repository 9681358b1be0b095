#!/usr/bin/env bash
# An agent in bash, curl and jq. It knows nothing of Stepwell: OPENAI_BASE_URL and OPENAI_API_KEY
# are in its environment, as for any other program. Usage: shell_agent.sh QUESTION
set -euo pipefail

tools='[{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object",
        "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}}]'
messages=$(jq -n --arg question "$1" '[{role: "user", content: $question}]')

for turn in 1 2 3 4; do
  reply=$(jq -n --argjson messages "$messages" --argjson tools "$tools" \
      '{model: "policy", $messages, $tools, temperature: 1, max_tokens: 48}' |
    curl --silent --show-error --fail-with-body "$OPENAI_BASE_URL/chat/completions" \
      --header "Authorization: Bearer $OPENAI_API_KEY" --json @- | jq '.choices[0].message')
  call=$(jq '.tool_calls[0] // empty' <<< "$reply")
  if [ -z "$call" ]; then
    jq --raw-output '.content // ""' <<< "$reply"
    exit
  fi
  expression=$(jq --raw-output '.function.arguments | fromjson? | .expression? // ""' <<< "$call")
  # Only digits, + and - reach the shell's arithmetic: the model's words are never run.
  result=$([[ $expression =~ ^[-+0-9\ ]+$ ]] && echo $((expression))) || result="error: not a sum"
  messages=$(jq --argjson reply "$reply" --argjson call "$call" --arg result "$result" \
    '. + [$reply, {role: "tool", tool_call_id: $call.id, content: $result}]' <<< "$messages")
done
echo "no answer"

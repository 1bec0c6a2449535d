#!/bin/sh
# An agent in plain shell: asks the model at $OPENAI_BASE_URL for a command, runs it, tells the output, until the model
# submits. It knows nothing of training; any endpoint of OpenAI's protocol does.
set -u

quote() { # standard input as the inside of a JSON string
    sed -e 's/\\/\\\\/g' -e 's/"/\\"/g' | awk '{ printf "%s%s", separator, $0; separator = "\\n" }'
}

messages="{\"role\": \"system\", \"content\": \"You repair programs.\"}"
messages="$messages, {\"role\": \"user\", \"content\": \"$(printf '%s' "$SKYRL_TASK" | quote)\"}"

while :; do
    reply=$(curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" \
        -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \
        -d "{\"model\": \"$SKYRL_MODEL\", \"messages\": [$messages]}") || { echo "$reply" >&2; exit 1; }
    # The answer as it stands in the JSON, which is how it goes back.
    answer=$(printf '%s' "$reply" | sed -n 's/.*"role":"assistant","content":"\(\([^"\\]\|\\.\)*\)".*/\1/p')
    command=$(printf '%b' "$answer" | sed -n '/^```mswea_bash_command$/,/^```$/p' | sed '1d;$d')
    output=$(sh -c "$command" 2>&1)
    case $output in COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT*) exit 0 ;; esac
    messages="$messages, {\"role\": \"assistant\", \"content\": \"$answer\"}"
    messages="$messages, {\"role\": \"user\", \"content\": \"$(printf '%s' "$output" | quote)\"}"
done

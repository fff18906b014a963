#!/usr/bin/env bash
# One vLLM that keeps its KV cache in a store: a prompt that was seen before, by this engine or another one, is not
# computed again. Needs a GPU; docs/vllm.md says what each setting means.
set -eu
cd "$(dirname "$0")"
model=${1:-Qwen/Qwen2.5-7B-Instruct}

# The store, on this machine: 64 GiB. On another one, give the address of that one in both.json, and a token file.
infinistore --service-port 22345 --prealloc-size 64 &
store=$!
infinistore stat --wait 600 >/dev/null &
trap 'kill $(jobs -p)' EXIT  # not before: Bash can lose the signal to a child that it is starting
wait -n $store $!  # for the store to answer, or to fail
kill -0 $store

vllm serve "$model" --port 8000 --kv-transfer-config "$(cat both.json)"

# Ask the same long prompt twice, the second time after vLLM was started again, and compare:
#
#   curl -s -o /dev/null -w '%{time_starttransfer} s\n' localhost:8000/v1/completions -H 'Content-Type: application/json' \
#       -d '{"model": "'"$model"'", "prompt": "...", "max_tokens": 1}'

#!/usr/bin/env bash
# Two vLLM, one of which computes prompts and the other one the answers; all they share is a store. Needs two GPUs here, or
# start each on a machine of its own and give the store's address in both files.
set -eu
cd "$(dirname "$0")"
model=${1:-Qwen/Qwen2.5-7B-Instruct}

infinistore --service-port 22345 --prealloc-size 64 &
store=$!
infinistore stat --wait 600 >/dev/null &
trap 'kill $(jobs -p)' EXIT  # not before: Bash can lose the signal to a child that it is starting
wait -n $store $!  # for the store to answer, or to fail
kill -0 $store
CUDA_VISIBLE_DEVICES=0 vllm serve "$model" --port 8100 --kv-transfer-config "$(cat prefill.json)" &
prefill=$!
CUDA_VISIBLE_DEVICES=1 vllm serve "$model" --port 8200 --kv-transfer-config "$(cat decode.json)" &
wait -n $store $prefill $!  # when one of them ends, all do

# What a proxy does with each request: first one token from the prefill engine, which answers when its blocks are stored,
# then the same request to the decode engine, which reads them.
#
#   request='{"model": "'"$model"'", "prompt": "...", "max_tokens": 200}'
#   curl -s localhost:8100/v1/completions -H 'Content-Type: application/json' \
#       -d "$(echo "$request" | jq -c '.max_tokens = 1')" >/dev/null
#   curl -s localhost:8200/v1/completions -H 'Content-Type: application/json' -d "$request"

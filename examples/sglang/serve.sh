#!/usr/bin/env bash
# SGLang whose hierarchical cache has a store as its third level. Needs a GPU; docs/sglang.md says what each setting means.
set -eu
cd "$(dirname "$0")"
model=${1:-Qwen/Qwen2.5-7B-Instruct}

# The store, on this machine: 64 GiB. On another one, give its address in hicache.json, and a token file.
infinistore --service-port 22345 --prealloc-size 64 &
store=$!
infinistore stat --wait 600 >/dev/null &
trap 'kill $(jobs -p)' EXIT  # not before: Bash can lose the signal to a child that it is starting
wait -n $store $!  # for the store to answer, or to fail
kill -0 $store

python -m sglang.launch_server --model-path "$model" --port 30000 --page-size 64 \
    --enable-hierarchical-cache --hicache-ratio 2 --hicache-mem-layout page_first --hicache-io-backend kernel \
    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config "$(cat hicache.json)"

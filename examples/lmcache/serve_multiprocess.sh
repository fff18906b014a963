#!/usr/bin/env bash
# LMCache in a process of its own, with a store as its second level, and vLLM. Needs a GPU; docs/lmcache.md has more.
set -eu
cd "$(dirname "$0")"
model=${1:-Qwen/Qwen2.5-7B-Instruct}

infinistore --service-port 22345 --prealloc-size 64 &
store=$!
infinistore stat --wait 600 >/dev/null &
trap 'kill $(jobs -p)' EXIT  # not before: Bash can lose the signal to a child that it is starting
wait -n $store $!  # for the store to answer, or to fail
kill -0 $store

# l2-adapter.args holds the flag --l2-adapter and its value, as a shell reads them.
eval "set -- $(cat l2-adapter.args)"
lmcache server --port 5555 --l1-size-gb 20 --eviction-policy LRU "$@" &

vllm serve "$model" --port 8000 --kv-transfer-config '{"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": 5555}}'

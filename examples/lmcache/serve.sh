#!/usr/bin/env bash
# vLLM with LMCache, and LMCache with a store behind it. Needs a GPU; docs/lmcache.md says what each setting means.
#
#   serve.sh [MODEL]                         with the plugin of this package
#   LMCACHE_CONFIG_FILE=builtin.yaml serve.sh    with LMCache's own connector
set -eu
cd "$(dirname "$0")"
model=${1:-Qwen/Qwen2.5-7B-Instruct}

# The store, on this machine: 64 GiB. On another one, give its address in the YAML file, and a token file.
infinistore --service-port 22345 --prealloc-size 64 &
store=$!
infinistore stat --wait 600 >/dev/null &
trap 'kill $(jobs -p)' EXIT  # not before: Bash can lose the signal to a child that it is starting
wait -n $store $!  # for the store to answer, or to fail
kill -0 $store

# Workers must agree on the hash of a token block: without this, Python chooses another one in each process.
export PYTHONHASHSEED=0
export LMCACHE_CONFIG_FILE=${LMCACHE_CONFIG_FILE:-plugin.yaml}
vllm serve "$model" --port 8000 --kv-transfer-config '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'

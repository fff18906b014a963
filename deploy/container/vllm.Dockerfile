# An engine with the connector: vLLM's own image, and the wheel of this package. With the repository as context:
#     make dist && docker build --file deploy/container/vllm.Dockerfile --tag infinistore-vllm .
ARG BASE=docker.io/vllm/vllm-openai:v0.32.0
FROM ${BASE}
COPY dist/*.whl /tmp/infinistore/
# Debian's Python installs packages beside its own only if it is told to.
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir /tmp/infinistore/*.whl \
    && rm -r /tmp/infinistore \
    && infinistore selftest --embedded

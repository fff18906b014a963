"""Which commands in the documentation no test runs, and why.

`tests/documentation/test_shell_blocks.py` runs all others. For each page, this tells
how a command begins, and the reason.
"""

from typing import Final

__all__ = ["LEFT_OUT"]

_ENGINE: Final = "it needs vLLM and a model; tests/integrations/vllm serves with it"
_LMCACHE: Final = "it needs LMCache and a model; tests/integrations/lmcache runs both"
_SGLANG: Final = "it needs SGLang and a GPU; tests/integrations/sglang runs its cache"
_FLEET: Final = "it needs engines; tests/routing routes to imitations"
_GPU: Final = "it needs a GPU; tests/gpu and tests/bench/test_gpu.py are rehearsed without one"
_INSTALLS: Final = "it would change the environment that the tests run in; tests/packages and tests/packaging install"
_CI: Final = "it would run itself; .ci/run does, as tests/packaging asserts"
_DOCKER: Final = "it needs Docker and an image from a registry; tests/deploy/test_container.py builds with buildah"
_KUBERNETES: Final = "it needs Kubernetes; tests/deploy/test_chart.py renders the chart with Helm"
_SYSTEMD: Final = "it needs systemd as process 1, and changes the machine; tests/deploy checks the units"
_STORES: Final = "it takes minutes, and needs the other stores; tests/bench checks its parts"
_CARD: Final = "it needs an RDMA device; tests/rdma runs the loopback with Soft-RoCE"

LEFT_OUT: Final[dict[str, dict[str, str]]] = {
    "README.md": {
        "make demo": _CI,
        "make test": _CI,
        "pip install": _INSTALLS,
    },
    "docs/aibrix.md": {
        "pip install": _INSTALLS,
    },
    "docs/command-line.md": {
        "infinistore doctor --rdma-loopback": _CARD,
    },
    "docs/container.md": {
        "docker build": _DOCKER,
        "TOKEN_GROUP=$(id -g) docker compose": _DOCKER,
        "curl --oauth2-bearer": _DOCKER,
        "docker run": _DOCKER,
        "infinistore stat": _DOCKER,
        "make dist": _INSTALLS,
    },
    "docs/demo.md": {
        "make demo": _CI,
    },
    "docs/fleet.md": {
        "CUDA_VISIBLE_DEVICES": _ENGINE,
        "infinistore monitor": _FLEET,
        "infinistore route": _FLEET,
        "infinistore simulate": "it needs a trace; tests/cli/test_simulate.py writes one",
    },
    "docs/gpu.md": {
        "build/luggage/run": _GPU,
        "make test-gpu": _GPU,
        "python bench/gpu.py": _GPU,
        "python scripts/luggage.py": "it needs the network; tests/bench/test_gpu_machine.py checks what it packs",
    },
    "docs/install.md": {
        "pip install": _INSTALLS,
        "pip wheel": _INSTALLS,
        "python3 -m venv": _INSTALLS,
        "source .venv": _INSTALLS,
    },
    "docs/kubernetes.md": {
        "ask &&": _KUBERNETES,
        "docker build": _DOCKER,
        "helm install": _KUBERNETES,
        "kubectl create": _KUBERNETES,
        "kubectl exec": _KUBERNETES,
        "make dist": _INSTALLS,
        "sed": _KUBERNETES,
    },
    "docs/lmcache.md": {
        "PYTHONHASHSEED=0 LMCACHE_CONFIG_FILE=plugin.yaml vllm serve": _LMCACHE,
        "lmcache server": _LMCACHE,
        "vllm serve": _LMCACHE,
    },
    "docs/monitor.md": {
        "infinistore monitor http://": _FLEET,
    },
    "docs/rdma.md": {
        "docker run": "it needs an RDMA card, and Docker",
        "infinistore doctor --rdma-loopback": _CARD,
        "python scripts/rdma_pair.py": _CARD,
    },
    "docs/reference/performance.md": {
        "python bench/compare.py": _STORES,
    },
    "docs/reference/scaling.md": {
        "python bench/scaling.py": "the page shows what it prints; scripts/generate.py runs it",
    },
    "docs/releasing.md": {
        "make release": "it runs all other tests; tests/packaging tries its parts",
    },
    "docs/sglang.md": {
        "pip install": _INSTALLS,
        "python -m sglang.launch_server": _SGLANG,
    },
    "docs/systemd.md": {
        "chown infinistore:": _SYSTEMD,
        "python3 -m venv": _INSTALLS,
        "systemctl daemon-reload": _SYSTEMD,
        "systemctl enable": _SYSTEMD,
        "systemd-sysusers": _SYSTEMD,
        "usermod": _SYSTEMD,
    },
    "docs/transformers.md": {
        "pip install": _INSTALLS,
    },
    "docs/tutorials/five-minutes.md": {
        "pip install": _INSTALLS,
        "python3 -m venv": _INSTALLS,
        "source .venv": _INSTALLS,
    },
    "docs/tutorials/moving.md": {
        "pip": _INSTALLS,
    },
    "docs/tutorials/two-hosts.md": {
        "INFINISTORE_TOKEN=$(cat token) vllm serve": _ENGINE,
    },
    "docs/tutorials/vllm.md": {
        "pip install": _INSTALLS,
        "vllm serve": _ENGINE,
    },
    "docs/vllm-scale.md": {
        "vllm serve": _ENGINE,
    },
    "docs/vllm.md": {
        "pip install": _INSTALLS,
        "vllm serve": _ENGINE,
    },
}

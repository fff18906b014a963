"""Gets vLLM's own tests, which its wheels lack, from its sdist.

    python tests/integrations/vllm/vllms_tests.py FOLDER

The sdist comes from the index that pip uses, and its hash is known: nothing else is
unpacked. pip cannot do this, because it would prepare a build of vLLM. Of a model that
these tests name, they need the configuration, which is written here.
"""

import hashlib
import io
import os
import re
import sys
import tarfile
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

__all__ = ["MODULES", "NAME", "unpack"]

NAME = "vllm-0.32.0"
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
MODULES = (
    "v1/core/test_scheduler.py",
    "v1/kv_connector/unit/test_invalid_blocks_correctness.py",
    "v1/kv_connector/unit/test_kv_load_failure_recovery.py",
    "v1/kv_connector/unit/test_remote_prefill_lifecycle.py",
)
"""The files with tests, in vLLM's folder of tests."""
_BESIDE = (
    "__init__.py",
    "v1/__init__.py",
    "v1/core/__init__.py",
    "v1/core/utils.py",
    "v1/kv_connector/__init__.py",
    "v1/kv_connector/unit/__init__.py",
    "v1/kv_connector/unit/conftest.py",
    "v1/kv_connector/unit/utils.py",
)
_MODEL = "hub/models--facebook--opt-125m"
_TIMEOUT_S = 60


def download() -> bytes:
    """Return the sdist.

    Raises:
        OSError: the index cannot be reached.
        LookupError: it does not have the sdist, or another one.
    """
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/vllm/"
    with urlopen(index, timeout=_TIMEOUT_S) as answer:
        page = answer.read().decode()
    link = re.search(rf'href="([^"#]*/{re.escape(NAME)}\.tar\.gz)', page)
    if link is None:
        raise LookupError(f"{NAME}.tar.gz is not in the index")
    with urlopen(urljoin(index, link[1]), timeout=_TIMEOUT_S) as answer:
        sdist: bytes = answer.read()
    if hashlib.sha256(sdist).hexdigest() != SHA256:
        raise LookupError(f"{NAME}.tar.gz has another hash than {SHA256}")
    return sdist


def unpack(sdist: bytes, folder: Path) -> None:
    """Unpack the tests into a folder, and write the model's configuration."""
    with tarfile.open(fileobj=io.BytesIO(sdist)) as archive:
        for name in (*MODULES, *_BESIDE):
            member = archive.extractfile(f"{NAME}/tests/{name}")
            assert member is not None, f"{name} is no file"
            place = folder / "tests" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(member.read())
    (folder / "pytest.ini").write_text("[pytest]\n")  # else another one is looked for above
    model = folder / _MODEL
    (model / "refs").mkdir(parents=True, exist_ok=True)
    (model / "refs" / "main").write_text("0")
    snapshot = model / "snapshots" / "0"
    snapshot.mkdir(parents=True, exist_ok=True)
    (snapshot / "config.json").write_text('{"architectures": ["OPTForCausalLM"], "model_type": "opt"}')
    (snapshot / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # weights: none


if __name__ == "__main__":
    unpack(download(), Path(sys.argv[1]))

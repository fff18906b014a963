"""The page about tensors: its examples run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bad_days.servers import running_server_process

PAGE = Path(__file__).parents[2] / "docs" / "tensors.md"


def test_the_examples_of_the_page_run_one_after_the_other(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(examples) == 5
    with running_server_process() as server:
        code = "\n".join(examples).replace("//server:22345", f"//127.0.0.1:{server.port}")
        command = [sys.executable, "-P", "-W", "error", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "LayerWriterStatistics(pending_writes=0" in done.stdout
    assert "to be computed: ['prompt/0/L3'," in done.stdout


def test_pytorch_is_not_imported_before_there_is_a_tensor() -> None:
    source = "import sys, infinistore.tensors; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

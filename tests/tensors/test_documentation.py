"""The page about tensors: its examples run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bad_days.servers import running_server_here

PAGE = Path(__file__).parents[2] / "docs" / "tensors.md"


def test_the_examples_of_the_page_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(examples) == 5
    with running_server_here() as server:
        code = "\n".join(examples).replace("//server:22345", f"//127.0.0.1:{server.port}")
        exec(compile(code, PAGE, "exec"), {"__name__": "__main__"})
    said = capsys.readouterr()
    assert said.err == ""
    assert "LayerWriterStatistics(pending_writes=0" in said.out
    assert "to be computed: ['prompt/0/L3'," in said.out


@pytest.mark.process
def test_pytorch_is_not_imported_before_there_is_a_tensor() -> None:
    source = "import sys, infinistore.tensors; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

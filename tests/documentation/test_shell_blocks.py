"""The shell commands of the README and of docs/ run, page by page, in the order of the
page. `left_out.py` names those that do not, with the reasons.

Each page has a folder, ports and a home of its own. `stage.sh` plays the reader.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster_io.etcd import Etcd, etcd
from tests.documentation.blocks import PROJECT, TUTORIALS, Block, blocks, of_pages
from tests.documentation.left_out import LEFT_OUT
from tests.ports import own_ports

__all__ = ["etcd"]

QUICK = ["docs/container.md", "docs/disk.md", "docs/systemd.md"]
"""The pages that `make test` has: each start of the command costs a third of a second.
"""
HERE = Path(__file__).resolve().parent
DISK = "infinistore --disk mnt/nvme0:256MiB"
CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=here "
    "-addext subjectAltName=IP:127.0.0.1 -keyout server.key -out server.pem 2>/dev/null; cp server.pem ca.pem"
)
IN_CLUSTER = 'infinistore --cluster "$cluster"'

BEFORE = {
    "docs/cluster.md": {"infinistore cluster drain": "node NODE"},
    "docs/command-line.md": {
        "infinistore pin": f"{DISK}; touch file; echo Be nice. | infinistore put system-prompt/0",
        "infinistore disk inspect": "stop",
        "infinistore cluster status": f"{IN_CLUSTER}; node NODE",
    },
    "docs/monitor.md": {
        "infinistore monitor  ": IN_CLUSTER,
        "infinistore monitor tcp://10.0.0.7:22345 --token-file": (
            "infinistore tenant add ops --role monitor --operator --tenants tenants.yaml > ops.token; "
            "infinistore --tenants tenants.yaml"
        ),
        "infinistore monitor --once": "infinistore --prealloc-size 64MiB",
    },
    "docs/security.md": {"infinistore --host": f"{CERTIFICATE}; echo secret > token; chmod 0600 token"},
    "docs/tenants.md": {"export": f"{CERTIFICATE}; mkdir -p etc/infinistore", "kill -HUP": "PID=$server"},
    "docs/troubleshooting.md": {"infinistore doctor": "infinistore --prealloc-size 64MiB"},
    "docs/upgrading.md": {
        "infinistore serve --take-over": (
            "mkdir etc; echo prealloc_size: 64MiB > etc/infinistore.yaml; infinistore --config etc/infinistore.yaml; "
            "before=$server; echo kept | infinistore put greeting"
        )
    },
}
"""What the reader of a page has done before a command: how that begins, and this in
shell.
"""

AFTER = {
    "docs/command-line.md": {
        "infinistore get": "[ $(infinistore get greeting) = hello ]",
        "infinistore put session": "infinistore stat | grep -q expired",
    },
    "docs/cluster.md": {
        "infinistore cluster add": 'infinistore cluster status "$cluster" | grep -E "NODE .*(joining|serving)"'
    },
    "docs/rdma.md": {"infinistore --dev-name": "infinistore selftest"},
    "docs/security.md": {
        "infinistore --host": (
            'infinistore selftest --url "infinistores://127.0.0.1:$port?ca=ca.pem" --token-file token'
        ),
        "openssl x509": "openssl verify -x509_strict -CAfile ca.pem server.pem",
    },
    "docs/tenants.md": {"infinistore tenant revoke": "[ $(grep -c sha256 etc/infinistore/tenants.yaml) = 3 ]"},
    "docs/upgrading.md": {
        "infinistore serve --take-over": 'wait "$before"; [ $(infinistore get greeting) = kept ]',
    },
}
"""What holds after a command, in the same way."""

Table = dict[str, dict[str, str]]


def rows_of(block: Block, command: str, table: Table) -> list[str]:
    """How the rows of a table begin that are about a command."""
    return [beginning for beginning in table.get(block.page_name, {}) if command.startswith(beginning)]


def commands(block: Block) -> Iterator[str]:
    """The commands of a block, each with all of its lines."""
    command = ""
    for line in block.code.splitlines(keepends=True):
        command += line
        if is_whole(command):
            if command.strip():
                yield command
            command = ""
    assert not command, f"{block.name} ends in the middle of a command"


def is_whole(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:  # a string that goes on
        return False
    return not command.endswith("\\\n")


ALL = [(block, command) for block in blocks("sh") for command in commands(block)]
PAGES = list(dict.fromkeys(block.page_name for block, command in ALL if not rows_of(block, command, LEFT_OUT)))


@pytest.mark.parametrize("table", [LEFT_OUT, BEFORE, AFTER], ids=["left out", "before", "after"])
def test_a_table_is_about_commands_that_there_are(table: Table) -> None:
    used = {(block.page_name, beginning) for block, command in ALL for beginning in rows_of(block, command, table)}
    assert {(page, beginning) for page, rows in table.items() for beginning in rows} == used


def here(code: str, port: int, manage_port: int, etcd_port: int, folder: Path) -> str:
    """A command with the addresses, paths and sizes of this machine."""
    cluster = folder.name.replace("_", "-")
    for pattern, replacement in {
        r"\b(22345|12345)\b": str(port),
        r"\b18080\b": str(manage_port),
        r"\bh1:2379(,h2:2379)?": f"127.0.0.1:{etcd_port}",
        r"(?<=[/ ])CLUSTER\b|(?<=/)kv(?= )": cluster,
        r"\b(0\.0\.0\.0|10\.0\.0\.\d+|prefill(?=:))": "127.0.0.1",
        r"(--prealloc-size) \S+": r"\1 192MiB",
        r"\b(1TiB|500GiB)\b": "256MiB",
        r"(?<=[ =])/(etc|mnt)/": rf"{folder}/\1/",
        r"(\.venv|/opt/infinistore)/bin/infinistore\b": "infinistore",
    }.items():
        code = re.sub(pattern, replacement, code)
    return code


def script(page: str, port: int, manage_port: int, etcd_port: int, folder: Path) -> tuple[str, list[str]]:
    """A page as a script for bash, and the lines that it has to print in order."""
    parts, expected = [(HERE / "stage.sh").read_text()], []
    for block in of_pages([page]):
        if block.language == "sh":
            for command in commands(block):
                if rows_of(block, command, LEFT_OUT):
                    continue
                parts.append(f"step={shlex.quote(f'{block.name} {command.strip()}')}")
                parts += [BEFORE[page][row] for row in rows_of(block, command, BEFORE)]
                parts.append(here(command, port, manage_port, etcd_port, folder))
                if re.search(r"^infinistore (-|serve).*&$", command.strip()):
                    parts.append("announced")
                parts += [AFTER[page][row] for row in rows_of(block, command, AFTER)]
        elif page in TUTORIALS and block.language == "python":
            code = here(block.code, port, manage_port, etcd_port, folder)
            parts.append(f"step={block.name}\npython -P -W error - <<'END'\n{code}END")
        elif page in TUTORIALS and block.language == "text":
            expected += block.code.splitlines()
    return "\n".join([*parts, "echo Every command has run."]), [*expected, "Every command has run."]


SLOWLY = [pytest.mark.nightly, pytest.mark.timeout(300)]


@pytest.mark.parametrize("page", [pytest.param(page, marks=[] if page in QUICK else SLOWLY) for page in PAGES])
def test_the_commands_of_a_page_run_one_after_the_other(
    page: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    needed = {word for block in of_pages([page]) for word in re.findall(r"\b(?:curl|openssl|etcd)\b", block.code)}
    if missing := [program for program in sorted(needed) if not shutil.which(program)]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    etcd: Etcd | None = request.getfixturevalue("etcd") if "etcd" in needed else None
    cluster = tmp_path.name.replace("_", "-")
    port, other_port, manage_port = own_ports(3)
    code, expected = script(page, port, manage_port, etcd.ports[0] if etcd else 0, tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("INFINISTORE_", "PYTHON"))}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "INFINISTORE_URL": f"infinistore://127.0.0.1:{port}",
        "INFINISTORE_SERVICE_PORT": str(port),
        "INFINISTORE_MANAGE_PORT": str(manage_port),
        "INFINISTORE_PREALLOC_SIZE": "192MiB",
        "TERM": "dumb",
        "here": str(HERE),
        "port": str(port),
        "other_port": str(other_port),
        "cluster": etcd.url_of(cluster) if etcd else "",
    }
    shutil.copytree(PROJECT / "deploy", tmp_path / "deploy")

    done = subprocess.run(
        ["bash", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    printed = iter(done.stdout.splitlines())
    missing = [line for line in expected if not any(line in one for one in printed)]
    assert missing == [], done.stdout

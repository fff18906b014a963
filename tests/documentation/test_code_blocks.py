"""The blocks of code in the README and in docs/: each can be read as what it says it
is, and every page with programs is named with where they run. test_shell_blocks.py runs
the commands, and test_documents.py reads the documents.
"""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import rich_click as click

from infinistore.cli.root import root
from tests import warm
from tests.documentation.blocks import TUTORIALS, Block, blocks, of_pages

LANGUAGES = {"python", "sh", "text", "json", "yaml", "toml", "mermaid", ""}

RUN = {
    "README.md": "here, and in test_fragments.py",
    "docs/index.md": "here",
    "docs/tensors.md": "in tests/tensors",
    "docs/transformers.md": "in tests/integrations",
    "docs/add-a-mover.md": "in tests/clients, as parts of examples/loopback_mover.py and of test_mover_contract.py",
    "docs/add-an-allocator.md": "in test_fragments.py",
    "docs/disk.md": "in test_fragments.py",
    "docs/fleet.md": "in test_fragments.py",
    "docs/long-conversations.md": "in test_fragments.py",
    "docs/opening-a-store.md": "in test_fragments.py",
    "docs/rdma.md": "in test_fragments.py, without a device",
    "docs/reference/metrics.md": "in test_fragments.py",
    "docs/scheduling.md": "in test_fragments.py",
    "docs/security.md": "in test_fragments.py",
}
"""Where the programs of each page run."""

COMMANDS = {
    "apt-get",
    "curl",
    "docker",
    "etcdctl",
    "export",
    "helm",
    "infinistore",
    "kill",
    "kubectl",
    "make",
    "openssl",
    "pip",
    "podman",
    "python",
    "python3",
    "sudo",
    "systemctl",
    "vllm",
}


def test_every_block_says_what_language_it_is_in() -> None:
    assert {block.language for block in blocks()} <= LANGUAGES


def test_the_programs_of_every_page_run() -> None:
    """A page that is not named has programs that nothing runs."""
    pages = {block.page_name for block in blocks("python")}
    assert pages == {*RUN, *(page for page in TUTORIALS if page in pages)}


def missing_names(block: Block) -> list[str]:
    """What a program imports from the store that is not there."""
    missing = []
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "infinistore":
            needs_torch = node.module == "infinistore.tensors" or "integrations" in node.module
            if needs_torch and not importlib.util.find_spec("torch"):
                continue
            module = importlib.import_module(node.module)
            missing += [f"{node.module}.{one.name}" for one in node.names if not hasattr(module, one.name)]
    return missing


def test_a_program_is_python_and_what_it_imports_from_the_store_exists() -> None:
    for block in blocks("python"):
        compile(block.code, block.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    assert {block.name: found for block in blocks("python") if (found := missing_names(block))} == {}


WITH_A_STORE = [
    block for block in of_pages(["README.md", "docs/index.md"]) if "blocking.open_store()" in block.code
]  # fmt: skip
PRINTED = {"README.md": ["2\nb'second block'\n"], "docs/index.md": ["2\n"]}


def test_a_program_with_a_store_of_its_own_runs(tmp_path: Path) -> None:
    printed: dict[str, list[str]] = {}
    for block in WITH_A_STORE:
        command = [sys.executable, "-P", "-W", "error", "-c", block.code]
        done = warm.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        printed.setdefault(block.page_name, []).append(done.stdout)
    assert printed == PRINTED


def test_shell_commands_can_be_parsed_and_ours_have_these_flags() -> None:
    """Parsed together, each in a subshell; if that fails, one by one, for the name."""
    if error := problem_of("".join(f"(:\n{block.code}\n)\n" for block in blocks("sh"))):
        found = {block.name: problem_of(block.code) for block in blocks("sh")}
        assert {name: problem for name, problem in found.items() if problem} == {}, error
        raise AssertionError(error)
    unknown = {
        block.name: flags
        for block in blocks("sh")
        if (flags := [flag for arguments in our_commands(block.code) for flag in unknown_flags(arguments)])
    }
    assert unknown == {}


def problem_of(code: str) -> str:
    """What bash says of a script that it does not run, if it cannot read it."""
    done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, check=False)
    return done.stderr or f"exit code {done.returncode}" * bool(done.returncode)


def test_what_can_be_typed_into_a_shell_is_tagged_so() -> None:
    """Else its flags are not checked."""

    def programs(block: Block) -> set[str]:
        return {line.split()[0].split("/")[-1] for line in block.code.splitlines() if line.strip()}

    assert [block.name for block in blocks("") if programs(block) & COMMANDS] == [], "tag it `sh`"


def test_no_command_looks_for_the_server_by_the_name_of_its_program() -> None:
    """It is that of Python, and `infinistore monitor` runs by the same name."""
    assert [block.name for block in blocks("sh") if re.search(r"\b(pidof|pgrep|pkill|killall)\b", block.code)] == []


def our_commands(code: str) -> Iterator[list[str]]:
    """The arguments of each call of `infinistore`, up to what the shell does next."""
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()<>")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a string that goes on in the next line: not a command of ours
            continue
        while words:
            rest = [index for index, word in enumerate(words) if set(word) <= set("|&;()<>")]
            command, words = (words[: rest[0]], words[rest[0] + 1 :]) if rest else (words, [])
            while command and ("=" in command[0] or command[0] == "sudo"):
                command = command[1:]
            if command and command[0].split("/")[-1] == "infinistore":
                yield command[1:]


def unknown_flags(arguments: list[str]) -> list[str]:
    """The flags that the command does not have that they are given to."""
    command: click.Command = root
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        found = command.get_command(click.Context(command), arguments[0])
        if found is None:
            break
        command, arguments = found, arguments[1:]
    if command is root:
        serve = root.get_command(click.Context(root), "serve")
        assert serve is not None
        command = serve
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help", "-h", "--version"}
    given = [word.split("=")[0] for word in arguments if word.startswith("-") and word != "-"]
    return [flag for flag in given if flag not in known and not flag[1:].isdigit()]

"""From an editable install, a wheel and an sdist, the same modules can be imported,
under one name each.
"""

import email
import os
import re
import sys
import zipfile
from pathlib import Path

import pytest

from .conftest import PROJECT, Distributions, Installation, run

LINKED_FOLDERS = ["allocators", "transports"]

# Adapters import what they adapt, which is not there: then it is enough that they are
# found.
IMPORT_ALL = """
import importlib, importlib.util, sys
for name in sys.argv[1:]:
    try:
        file = importlib.import_module(name).__file__
    except ModuleNotFoundError as error:
        if not name.startswith("infinistore.integrations.") or error.name.startswith("infinistore"):
            raise
        file = importlib.util.find_spec(name).origin
    print(name, file)
"""


def files_of_the_package() -> set[Path]:
    """Every file that belongs into a wheel, relative to the folder that holds the
    package, links followed.
    """
    return {
        (Path(folder) / file).relative_to(PROJECT)
        for folder, _, files in os.walk(PROJECT / "infinistore", followlinks=True)
        for file in files
        if not file.endswith(".pyc")
    }


def modules_of_the_package() -> dict[str, Path]:
    """Every module by its name, but for __main__, which is a program."""
    found = {}
    for path in files_of_the_package():
        if path.suffix == ".py" and path.name != "__main__.py":
            parts = path.with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@pytest.mark.nightly
def test_every_module_can_be_imported(installation: Installation) -> None:
    expected = modules_of_the_package()
    assert {f"infinistore.{folder}" for folder in LINKED_FOLDERS} <= expected.keys()

    printed = installation.execute(IMPORT_ALL, *sorted(expected))

    imported = dict(line.split(" ", 1) for line in printed.splitlines())
    root = installation.package.parent
    assert imported == {name: str(root / path) for name, path in expected.items()}


# What each program is refused with, one line each.
REFUSALS = """
import sys
for source in sys.argv[1:]:
    try:
        exec(source)
    except ImportError as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print("it is not refused")
"""
BARE = [f"import {folder}" for folder in LINKED_FOLDERS]


def test_a_linked_folder_is_refused_under_its_bare_name(installation: Installation) -> None:
    # An editable install puts the checkout on sys.path, so that the folder is found: it
    # refuses by itself.
    is_found = installation.kind == "editable"
    refused = installation.execute(REFUSALS, *BARE).splitlines()
    for folder, line in zip(LINKED_FOLDERS, refused, strict=True):
        expected = f"ImportError: import infinistore.{folder}" if is_found else "ModuleNotFoundError: No module named"
        assert line.startswith(expected)


def test_a_linked_folder_is_refused_under_its_bare_name_in_the_checkout() -> None:
    done = run([sys.executable, "-c", REFUSALS, *BARE], cwd=PROJECT)

    for folder, line in zip(LINKED_FOLDERS, done.stdout.splitlines(), strict=True):
        assert line.startswith(f"ImportError: import infinistore.{folder}")


@pytest.mark.parametrize("folder", LINKED_FOLDERS)
def test_a_link_is_relative_so_that_a_clone_can_lie_anywhere(folder: str) -> None:
    link = PROJECT / "infinistore" / folder
    if not link.is_symlink():
        pytest.skip("this tree was unpacked from an sdist, which has folders in place of the links")
    assert link.readlink() == Path("..", folder)


def test_both_wheels_hold_exactly_the_files_of_the_package_and_the_manual_page(distributions: Distributions) -> None:
    expected = {*map(str, files_of_the_package()), "share/man/man1/infinistore.1"}

    for wheel in (distributions.wheel, distributions.wheel_of_sdist):
        with zipfile.ZipFile(wheel) as archive:
            names = {name.rpartition(".data/data/")[2] for name in archive.namelist() if ".dist-info/" not in name}
        assert names == expected


def test_a_wheel_puts_one_name_into_site_packages_and_says_that_it_is_typed(distributions: Distributions) -> None:
    for wheel in (distributions.wheel, distributions.wheel_of_sdist):
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
        top = {name.split("/")[0] for name in names if ".data/data/" not in name}
        (metadata,) = top - {"infinistore"}
        assert metadata.endswith(".dist-info")
        assert "infinistore/py.typed" in names
        assert f"{metadata}/licenses/LICENSE" in names


def test_the_version_is_the_same_everywhere(installation: Installation) -> None:
    printed = installation.execute(
        "import importlib.metadata, infinistore\n"
        "print(infinistore.__version__, importlib.metadata.version('infinistore-trio'))\n"
    )
    package, metadata = printed.split()
    assert package == metadata


def test_the_distribution_has_a_name_that_is_not_the_originals(distributions: Distributions) -> None:
    """`infinistore` is another project's on PyPI: a requirement of that name, of ours
    too, would bring that.
    """
    for wheel in (distributions.wheel, distributions.wheel_of_sdist):
        assert wheel.name.startswith("infinistore_trio-")
        with zipfile.ZipFile(wheel) as archive:
            (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            headers = email.message_from_bytes(archive.read(metadata))
        assert headers["Name"] == "infinistore-trio"
        needed = [re.split(r"[^\w.-]", one, maxsplit=1)[0] for one in headers.get_all("Requires-Dist", [])]
        assert "infinistore" not in needed


ORIGINAL = {
    "infinistore/__init__.py": "from .lib import InfinityConnection\n",
    "infinistore/lib.py": "class InfinityConnection: ...\n",
    "infinistore/server.py": "def main(): ...\n",
}
"""What pip writes for the original, into the same folder, without a word."""


PROGRAMS = [
    *("import infinistore", "import infinistore.blocking", "from infinistore.server import main"),
    *("from infinistore.cli import main; main(['--help'])", "import infinistore.tensors"),
]
# Each program in a child, which has imported nothing of ours.
IN_CHILDREN = """
import os, sys
_, folder, *sources = sys.argv
sys.path.insert(0, folder)
for source in sources:
    sys.stdout.flush()
    if os.fork() == 0:
        try:
            exec(source)
        except ImportError as error:
            print(f"ImportError: {error}")
        else:
            print("it is not refused")
        break
    os.wait()
"""


@pytest.mark.parametrize("last", ["ours", "original"])
def test_beside_the_original_everything_refuses_and_says_what_helps(
    distributions: Distributions, tmp_path: Path, last: str
) -> None:
    with zipfile.ZipFile(distributions.wheel) as archive:
        archive.extractall(tmp_path)
    for name, text in ORIGINAL.items():
        if last == "original" or not (tmp_path / name).exists():
            (tmp_path / name).write_text(text)
    # Written last, it is the original that is imported, and nothing of ours runs.
    programs = [one for one in PROGRAMS if one != "import infinistore" or last == "ours"]

    done = run([sys.executable, "-P", "-c", IN_CHILDREN, tmp_path, *programs], cwd=tmp_path)

    refused = done.stdout.splitlines()
    assert len(refused) == len(programs), done.stderr
    for line in refused:
        assert line.startswith("ImportError: the original InfiniStore")
        assert "pip uninstall -y infinistore infinistore-trio" in line


@pytest.mark.parametrize(
    ("group", "names"), [("allocators", ["bitmap", "jemalloc", "slab"]), ("eviction", ["adaptive", "lru"])]
)
def test_every_registered_strategy_can_be_loaded(installation: Installation, group: str, names: list[str]) -> None:
    printed = installation.execute(
        "from importlib.metadata import entry_points\n"
        f"for point in entry_points(group='infinistore.{group}'):\n"
        "    print(point.name, point.load().name)\n"
    )
    assert sorted(printed.splitlines()) == [f"{name} {name}" for name in names]


def test_the_command_starts_as_a_script_and_as_a_module(installation: Installation) -> None:
    script = installation.run(installation.root / "bin" / "infinistore", "--help")
    module = installation.run(installation.python, "-m", "infinistore", "--help")

    assert (script.returncode, module.returncode) == (0, 0), script.stderr + module.stderr
    assert "Usage" in script.stdout
    assert "Usage" in module.stdout

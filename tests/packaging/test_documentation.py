"""What the documents say can be done: links lead somewhere, and targets exist."""

import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import yaml

from infinistore.config import load_server_config

from .conftest import PROJECT
from .test_layers import MAY_IMPORT, WITHIN

PACKAGE = PROJECT / "infinistore"
DOCUMENTS = sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md")])


def identify(document: Path) -> str:
    return str(document.relative_to(PROJECT))


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), flags=re.MULTILINE))


def offenders(
    problems_of: Callable[[Path], Iterable[str]], documents: Iterable[Path] = DOCUMENTS
) -> dict[str, list[str]]:
    """The documents with problems, and these."""
    found = {identify(document): sorted(problems_of(document)) for document in documents}
    return {name: problems for name, problems in found.items() if problems}


def test_a_relative_link_leads_to_a_file() -> None:
    def missing(document: Path) -> Iterator[str]:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
            if "://" not in link and not (document.parent / link).exists():
                yield link

    assert offenders(missing) == {}


def without_code(text: str) -> str:
    """A document without its fenced blocks of code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """The fragments by which a link can name a heading, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(document.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_link_to_a_heading_finds_it() -> None:
    def missing(document: Path) -> Iterator[str]:
        for path, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", without_code(document.read_text())):
            if "://" not in path and anchor not in anchors(document.parent / path if path else document):
                yield f"{path}#{anchor}"

    assert offenders(missing) == {}


ARCHITECTURE = PROJECT / "docs" / "architecture.md"
ABOUT_THE_SOURCE = [PROJECT / "CONTRIBUTING.md", ARCHITECTURE]
ABOUT_THE_SOURCE += [PROJECT / "docs" / f"{name}.md" for name in ("how-a-put-travels", "add-a-mover", "add-a-request")]
TOPS = (PROJECT, PACKAGE, PROJECT / "tests")
A_PATH = re.compile(r"`((?:\w[\w.-]*/)+[\w.-]*|\w+\.py)`")
"""What is in backticks and has a slash, or ends as a module does."""
MADE = ("build/", "dist/")
"""What a build makes, and a fresh clone does not have."""


def test_a_file_or_folder_that_is_named_exists() -> None:
    """Relative to the repository, to `infinistore/` or to `tests/`."""

    def named(document: Path) -> set[str]:
        found = {one for one in A_PATH.findall(without_code(document.read_text())) if not one.startswith(MADE)}
        assert found, document
        return found

    def missing(document: Path) -> list[str]:
        return [one for one in named(document) if not any((top / one).exists() for top in TOPS)]

    assert offenders(missing, ABOUT_THE_SOURCE) == {}


def test_the_arrows_of_the_architecture_are_imports_that_are_allowed() -> None:
    pictures = re.findall(r"```mermaid\n(.*?)```", ARCHITECTURE.read_text(), flags=re.DOTALL)
    rules = [MAY_IMPORT, WITHIN["client"], WITHIN["server"]]
    for picture, allowed in zip(pictures, rules, strict=True):
        arrows = re.findall(r"^ +(\w+) --> (\w+)$", picture, flags=re.MULTILINE)
        assert len(arrows) == picture.count("-->")
        assert [(above, below) for above, below in arrows if below not in allowed[above]] == []


WIDTH = 88
LINES_OF_ANY_LENGTH = re.compile(r"^(\||<!--|#|!\[)|^\S*$")
"""Tables, comments, headings, pictures, and what cannot be broken."""


def test_prose_is_wrapped() -> None:
    def too_long(document: Path) -> list[str]:
        lines = without_code(document.read_text()).splitlines()
        return [line for line in lines if len(line) > WIDTH and not LINES_OF_ANY_LENGTH.match(line)]

    assert offenders(too_long) == {}


def test_a_make_target_that_is_named_exists() -> None:
    targets = make_targets()
    assert offenders(lambda document: set(re.findall(r"`make ([a-z-]+)", document.read_text())) - targets) == {}


INSTALL = re.compile(r"\bpip3? (?:install|wheel|download)((?: +(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s`'\"#;&)]+))*)")
OPTIONS_WITH_A_VALUE = {"--wheel-dir", "-w", "--python", "--index-url", "--extra-index-url"}


def told_to_install(text: str) -> Iterator[str]:
    """What a text says that pip should install, without the options."""
    for command in INSTALL.findall(text):
        previous = ""
        for argument in shlex.split(command):
            if not argument.startswith("-") and previous not in OPTIONS_WITH_A_VALUE:
                yield argument
            previous = argument


def texts_with_install_lines() -> list[Path]:
    patterns = [
        "*.md",
        "docs/**/*",
        "examples/**/*",
        "infinistore/**/*.py",
        "bench/*.py",
        "pyproject.toml",
    ]
    patterns += ["allocators/*.py", "transports/*.py", "requirements/*", "tests/rdma/guest/*"]
    found = {path for pattern in patterns for path in PROJECT.glob(pattern) if path.is_file() and path.suffix != ".svg"}
    return sorted(path for path in found if "__pycache__" not in path.parts)


def test_every_install_line_gives_this_package_and_not_its_namesake_on_pypi() -> None:
    """From a clone or a wheel: it is not on PyPI, and the `infinistore` there is
    another project.
    """
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    wrong, ours = [], []
    for path in texts_with_install_lines():
        text = path.read_text()
        for argument in told_to_install(text):
            requirement, _, extras = argument.rstrip("]").partition("[")
            if re.fullmatch(r"infinistore.*", requirement):
                wrong.append((identify(path), argument))
            elif requirement in (".", "/path/to/InfiniStore", "dist/infinistore_trio-*.whl"):
                ours.append(argument)
                assert set(filter(None, extras.split(","))) <= project["optional-dependencies"].keys()
        if path.suffix != ".toml":
            wrong += [(identify(path), extra) for extra in re.findall(r"infinistore\[\w+\]", text)]
    assert wrong == []
    assert {".", "dist/infinistore_trio-*.whl"} <= set(ours)


def test_the_pod_of_the_page_on_kubernetes_has_settings_that_exist(tmp_path: Path) -> None:
    page = (PROJECT / "docs" / "kubernetes.md").read_text()
    (text,) = (block for block in re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL) if "kind: Pod" in block)
    container = list(yaml.safe_load_all(text))[1]["spec"]["containers"][0]
    variables = {one["name"]: one["value"] for one in container["env"]}
    variables["INFINISTORE_TOKEN_FILE"] = str(tmp_path / "token")
    (tmp_path / "token").write_text("secret")
    flags = container["command"][1:]
    given = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(flags[::2], flags[1::2], strict=True)
    }

    config = load_server_config(given, environment=variables)

    assert (config.host, config.manage_host, config.service_port) == ("0.0.0.0", "0.0.0.0", 12345)
    assert config.manage_port == container["livenessProbe"]["httpGet"]["port"]


def test_the_quick_start_is_two_commands_and_ci_runs_both() -> None:
    readme = (PROJECT / "README.md").read_text()
    quick_start = readme.partition("## Quick start")[2].partition("\n## ")[0]
    commands = re.findall(r"```sh\n(.*?)\n```", quick_start, flags=re.DOTALL)
    assert commands == ["make demo", "make test"]
    ci = PROJECT / ".ci" / "run"
    assert set(commands) <= {line.strip().removeprefix("run ") for line in ci.read_text().splitlines()}

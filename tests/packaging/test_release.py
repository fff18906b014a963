"""What a release is made of, as far as it can be seen before there is one."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests import warm

from .conftest import PROJECT

WORKFLOW: dict[Any, Any] = yaml.safe_load((PROJECT / ".github" / "workflows" / "release.yml").read_text())


def locked() -> dict[str, str]:
    lock = (PROJECT / "requirements" / "server.lock").read_text()
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", lock, flags=re.MULTILINE))


def test_the_lock_has_every_dependency_of_a_server_at_a_version_that_is_allowed() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    versions = locked()
    for text in [*project["dependencies"], *project["optional-dependencies"]["disk"]]:
        needed = Requirement(text)
        assert needed.specifier.contains(versions[needed.name]), f"{text}: run `make lock`"


def test_everything_in_the_lock_has_a_hash_and_names_no_registry() -> None:
    lock = (PROJECT / "requirements" / "server.lock").read_text()
    entries = re.split(r"^(?=\w)", lock.split("\n", 2)[2], flags=re.MULTILINE)
    assert len([entry for entry in entries if entry]) >= len(locked()) > 15
    assert [entry for entry in entries if entry and "--hash=sha256:" not in entry] == []
    assert "://" not in lock


def test_a_release_is_built_once_and_what_was_built_is_tried_attested_and_published() -> None:
    jobs = WORKFLOW["jobs"]
    builders = [name for name, job in jobs.items() if any("make dist" in step.get("run", "") for step in job["steps"])]
    assert builders == ["build"]
    assert WORKFLOW[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    assert jobs["publish"]["needs"] == ["build", "test", "audit"]
    assert [step["run"] for step in jobs["audit"]["steps"] if "run" in step] == ["make audit"]
    for name in ("test", "publish", "release"):
        assert any("download-artifact" in step.get("uses", "") for step in jobs[name]["steps"])
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    supported = [text.split(":: ")[-1] for text in project["classifiers"] if re.search(r":: 3\.\d+$", text)]
    assert jobs["test"]["strategy"]["matrix"]["python"] == supported


def test_no_job_has_a_secret_or_more_rights_than_it_needs() -> None:
    assert "secrets." not in (PROJECT / ".github" / "workflows" / "release.yml").read_text()
    assert WORKFLOW["permissions"] == {}
    rights = {
        name: {right for right, level in job["permissions"].items() if level == "write"}
        for name, job in WORKFLOW["jobs"].items()
    }
    assert {name: found for name, found in rights.items() if found} == {
        "publish": {"attestations", "id-token"},
        "release": {"contents"},
    }


def test_actions_are_named_by_commit() -> None:
    used = [step["uses"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "uses" in step]
    assert [one for one in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", one)] == []


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A tree that can be released as v1.2.3."""
    files = {
        "scripts/release.py": (PROJECT / "scripts" / "release.py").read_text(),
        "infinistore/version.py": '__version__ = "1.2.3"\n',
        "deploy/helm/infinistore/Chart.yaml": 'name: infinistore\nversion: 1.2.3\nappVersion: "1.2.3"\n',
        "CHANGELOG.md": "# Changelog\n\n## 1.2.3 (2026-01-01)\n\nNew.\n\n## 1.2.2 (2025-01-01)\n\nOld.\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def repository(project: Path) -> Path:
    """The same before 1.2.4, in a repository."""
    changelog = project / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("## 1.2.3", "## 1.2.4 (not released yet)\n\nNewer.\n\n## 1.2.3"))
    git(project, "init", "--quiet")
    git(project, "add", ".")
    git(project, "commit", "--quiet", "--message", "all")
    return project


def git(project: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    command = ["git", *who, *arguments]
    return subprocess.run(command, cwd=project, check=True, capture_output=True, text=True).stdout


def release(project: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    script = str(project / "scripts" / "release.py")
    return warm.run([sys.executable, script, *arguments], capture_output=True, text=True)


def test_the_notes_of_a_release_are_its_part_of_the_changelog(project: Path) -> None:
    done = release(project, "v1.2.3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "New.\n", "")


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("infinistore/version.py", "1.2.3", "1.2.2", "version.py says 1.2.2"),
        ("deploy/helm/infinistore/Chart.yaml", 'appVersion: "1.2.3"', 'appVersion: "1.2.2"', "Chart.yaml says 1.2.2"),
        ("deploy/helm/infinistore/Chart.yaml", "\nversion: 1.2.3", "\nversion: 1.2.4", "Chart.yaml says 1.2.4"),
        ("CHANGELOG.md", "## 1.2.3", "## 1.2.1", "no section `## 1.2.3"),
        ("CHANGELOG.md", "2026-01-01", "not released yet", "no date"),
    ],
)
def test_a_tag_that_cannot_be_released_is_refused_in_one_line(
    project: Path, file: str, old: str, new: str, said: str
) -> None:
    (project / file).write_text((project / file).read_text().replace(old, new))

    done = release(project, "v1.2.3")

    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_version_is_set_in_every_place_where_it_stands(repository: Path) -> None:
    assert release(repository, "--set", "1.2.4").returncode == 0

    assert release(repository, "v1.2.4").stdout == "Newer.\n"
    assert git(repository, "diff", "--name-only").split() == [
        "CHANGELOG.md",
        "deploy/helm/infinistore/Chart.yaml",
        "infinistore/version.py",
    ]


def test_a_try_writes_nothing_and_wants_neither_a_date_nor_a_clean_tree(repository: Path) -> None:
    (repository / "new").touch()

    assert release(repository, "--try", "--set", "1.2.4").returncode == 0

    assert git(repository, "status", "--porcelain") == "?? new\n"


@pytest.mark.parametrize(
    ("version", "said"), [("1.2", "no version"), ("1.2.4", "tree has changes, such as new"), ("1.2.3", "tag v1.2.3")]
)
def test_a_version_that_cannot_be_set_is_refused_and_nothing_is_written(
    repository: Path, version: str, said: str
) -> None:
    (repository / "new").touch()
    git(repository, "tag", "v1.2.3")

    done = release(repository, "--set", version)

    assert done.returncode == 1
    assert said in done.stderr
    assert git(repository, "status", "--porcelain") == "?? new\n"


def test_the_version_stands_in_the_same_places_here() -> None:
    project = {name: (PROJECT / name).read_text() for name in ("infinistore/version.py", "CHANGELOG.md")}
    chart = yaml.safe_load((PROJECT / "deploy" / "helm" / "infinistore" / "Chart.yaml").read_text())
    assert f'__version__ = "{chart["version"]}"' in project["infinistore/version.py"]
    assert chart["appVersion"] == chart["version"]
    assert f"## {chart['version']} (" in project["CHANGELOG.md"]

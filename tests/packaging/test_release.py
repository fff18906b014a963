"""What a release is made of, as far as it can be seen before there is one."""

import re
import shutil
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
    for name in ("scripts", "infinistore", "changes"):
        (tmp_path / name).mkdir()
    shutil.copy(PROJECT / "scripts" / "release.py", tmp_path / "scripts")
    (tmp_path / "infinistore" / "version.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "changes" / "README.md").write_text("")
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 1.2.3 (2026-01-01)\n\nNew.\n\n## 1.2.2 (2025-01-01)\n\nOld.\n"
    )
    return tmp_path


def release(project: Path, tag: str) -> "subprocess.CompletedProcess[str]":
    return warm.run([sys.executable, project / "scripts" / "release.py", tag], capture_output=True, text=True)


def test_the_notes_of_a_release_are_its_part_of_the_changelog(project: Path) -> None:
    done = release(project, "v1.2.3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "New.\n", "")


@pytest.mark.parametrize("problem", ["tag", "entry", "changelog"])
def test_a_tag_that_cannot_be_released_is_refused_in_one_line_that_says_what_to_do(project: Path, problem: str) -> None:
    tag, said = "v1.2.3", "towncrier build --version 1.2.3"
    if problem == "tag":
        tag, said = "v1.2.4", "the package says 1.2.3"
    elif problem == "entry":
        (project / "changes" / "+new.added.md").write_text("new\n")
    else:
        (project / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.2 (2025-01-01)\n\nOld.\n")

    done = release(project, tag)

    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1

"""On a machine with a GPU and without a network: install the luggage, run the tests in
tests/gpu and the parts of bench/gpu.py, and write a report.

    build/luggage/run [--seconds 570] [--only PART ...]

`scripts/luggage.py` packs the luggage. Each part is a process of its own. The report in
build/gpu is written after each, so that a run that is cut off loses only the part that
it was at, and the next one goes on. With --seconds it ends by itself. The exit code is
0 if all is done and as wanted, 1 if something failed, 3 if parts are left.

Only Python's own library is needed to start it. It uses the `python3` that runs it,
which has to be the one that has PyTorch.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from gpu_report import PARTS, Report, markdown, missed, why_not

__all__ = ["Machine", "main", "tests"]

TOP: Final = Path(__file__).resolve().parents[1]
PART_S: Final = 900.0
"""How long a part may take. Tests have limits of their own."""
DONE, FAILED, NO_GPU, LEFT = 0, 1, 2, 3
_WARNINGS: Final = ("-W", "default", "-W", "error::pytest.PytestUnraisableExceptionWarning")


def tests() -> list[str]:
    """Return the files of tests, which are parts, too."""
    return [str(file.relative_to(TOP)) for file in sorted((TOP / "tests" / "gpu").glob("test_*.py"))]


class Machine:
    """Where it runs: what is installed goes into `folder`, and so does the report."""

    def __init__(self, folder: Path, device: str, end: float) -> None:
        self._folder = folder
        self._device = device
        self._end = end
        self._where = ""
        self.report = Report(folder / "report.json")

    def _environment(self, *sites: str) -> dict[str, str]:
        places = [str(TOP), *(str(self._folder / site) for site in ("site", *sites))]
        own = {"PYTHONPATH": os.pathsep.join(places), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        return {**os.environ, **own, **({"TEST_GPU": "cpu"} if self._device == "cpu" else {})}

    def _python(self, *arguments: object, sites: Sequence[str] = ()) -> "subprocess.CompletedProcess[str]":
        left = min(PART_S, self._end - time.monotonic())
        command = [sys.executable, *map(str, arguments)]
        with subprocess.Popen(command, cwd=TOP, env=self._environment(*sites), process_group=0) as process:
            try:
                process.wait(left)
            except BaseException:
                os.killpg(process.pid, 9)  # and what it started
                raise
        return subprocess.CompletedProcess(command, process.returncode)

    def install(self, luggage: Path) -> None:
        """Install into folders of its own what this Python lacks, once.

        A virtual environment would not do: made from another one, it does not see what
        that has.
        """
        wheels = sorted(str(file) for file in luggage.rglob("*.whl"))
        stamp = self._folder / "site" / "installed.json"
        if stamp.is_file() and json.loads(stamp.read_text()) == wheels:
            return
        for site in ("site", "lmcache"):
            shutil.rmtree(self._folder / site, ignore_errors=True)
        self._install("site", _lacking(luggage))
        if (luggage / "lmcache").is_dir():
            self._install("lmcache", sorted(map(str, (luggage / "lmcache").glob("*.whl"))))
        stamp.write_text(json.dumps(wheels))

    def _install(self, site: str, wheels: Sequence[str]) -> None:
        (self._folder / site).mkdir(parents=True)
        if wheels:
            print(f"-- into {site}: {', '.join(Path(wheel).name.partition('-')[0] for wheel in wheels)}", flush=True)
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
            command += ["--no-cache-dir", "--disable-pip-version-check", "--target", str(self._folder / site)]
            subprocess.run([*command, *wheels], check=True)

    def run(self, name: str) -> None:
        """Run a part, and keep its result.

        Raises:
            TimeoutExpired: the time that was given is over. Nothing was kept.
        """
        print(f"== {name}", flush=True)
        began = time.monotonic()
        try:
            result = self._result(name)
        except subprocess.TimeoutExpired:
            if name == "shards" or self._end - time.monotonic() < 1:
                raise
            result = {"broke": f"took more than {PART_S:.0f} s"}
        if result is not None:
            result = {"machine": self.where(), **result, "seconds": round(time.monotonic() - began, 1)}
            self.report.keep(name, result)
        self.write()

    def _result(self, name: str) -> dict[str, Any] | None:
        if name in tests():
            return self._test(name)
        return self._measure_shards() if name == "shards" else self._measure(name)

    def where(self) -> str:
        """Return which machine this is."""
        if not self._where:
            command = [sys.executable, "bench/gpu.py", "--device", self._device, "--describe"]
            told = subprocess.run(
                command, cwd=TOP, env=self._environment(), capture_output=True, text=True, check=False
            )
            self._where = told.stdout.strip().rpartition("\n")[2] or "a machine that cannot be described"
        return self._where

    def _test(self, name: str) -> dict[str, Any]:
        file = self._folder / f"{Path(name).stem}.xml"
        file.unlink(missing_ok=True)
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-o", "junit_family=xunit1"]
        done = self._python("-m", "pytest", name, *options, *_WARNINGS, f"--junitxml={file}")
        return outcome(file, done.returncode)

    def _measure(self, name: str) -> dict[str, Any] | None:
        """Have bench/gpu.py keep the result itself, unless it ends before."""
        options = ["--device", self._device, "--report", self._folder / "report.json", "--again", "--parts", name]
        done = self._python("bench/gpu.py", *options, sites=["lmcache"] if name == "ttft-lmcache" else [])
        self.report = Report(self._folder / "report.json")
        if done.returncode and "broke" not in self.report.parts.get(name, {}):
            return {"broke": f"it ended with status {done.returncode}"}
        return None

    def _measure_shards(self) -> dict[str, Any]:
        """Run bench/shards.py, which goes on by itself where it was cut off.

        Raises:
            TimeoutExpired: rows are left.
        """
        file = self._folder / "shards.json"
        left = min(PART_S, self._end - time.monotonic()) - 60
        small = ["--quick", "--shards", "2", "--clients", "1"] if self._device == "cpu" else []
        done = self._python("bench/shards.py", "--json", file, "--resume", "--limit", max(1, left), *small)
        if done.returncode:
            return {"broke": f"it ended with status {done.returncode}"}
        found = json.loads(file.read_text())
        if found["missing"]:
            raise subprocess.TimeoutExpired(done.args, left)
        ratios = ((row["row"], other, ratio) for row in found["rows"] for other, ratio in row["ratios"].items())
        return {"figures": {f"{row}: {other}": ratio for row, other, ratio in ratios}}

    def write(self) -> None:
        """Write the tables."""
        (self._folder / "report.md").write_text(markdown(self.report.parts, tests()))


def outcome(file: Path, status: int) -> dict[str, Any]:
    """Return what pytest has written in its report, or that it broke."""
    if not file.is_file():
        return {"broke": f"pytest ended with status {status}, and wrote no report"}
    result: dict[str, Any] = {"passed": 0, "failed": [], "skipped": [], "told": {}}
    for case in ElementTree.parse(file).iter("testcase"):
        name = case.get("name", "")
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        skipped = case.find("skipped")
        if bad is not None:
            result["failed"].append(name)
            result["told"][name] = bad.get("message", "")[:1000]
        elif skipped is not None:
            result["skipped"].append(f"{name}: {skipped.get('message', '')}"[:300])
        else:
            result["passed"] += 1
        for told in case.iter("property"):
            result["told"][f"{name}, {told.get('name')}"] = told.get("value")
    if not result["passed"] and not result["failed"] and not result["skipped"]:
        return {"broke": f"pytest ended with status {status}, and ran nothing"}
    return result


def _lacking(luggage: Path) -> list[str]:
    """Return the wheels that this Python needs, as pip finds out; all of them if it
    cannot.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-index", "--report", "-"]
    command += ["--disable-pip-version-check", "--find-links", str(luggage / "wheels")]
    command += ["--requirement", str(luggage / "requirements.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)["install"]
        return sorted(one["download_info"]["url"].removeprefix("file://") for one in found)
    except (ValueError, KeyError):
        print(f"-- all is installed, since pip cannot tell what is lacking: {done.stderr.strip()[:500]}", flush=True)
        return sorted(map(str, (luggage / "wheels").glob("*.whl")))


def failed(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each part that is not as it should be."""
    lines = []
    for name, result in parts.items():
        bad = (
            [why_not(result)] if "broke" in result else result.get("failed") or missed(name, result.get("figures", {}))
        )
        if bad:
            lines.append(f"{name}: {', '.join(bad)}")
    return lines


def has_gpu() -> bool:
    """Whether nvidia-smi finds a GPU; it prints which."""
    return shutil.which("nvidia-smi") is not None and not subprocess.run(["nvidia-smi", "-L"], check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
    names = [*tests(), *PARTS]
    parser.add_argument("--luggage", type=Path, default=TOP / "build" / "luggage", help="what was packed")
    parser.add_argument("--folder", type=Path, default=TOP / "build" / "gpu", help="for the report (build/gpu)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so long, and say what is left")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--again", action="store_true", help="also parts that the report has")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu is a rehearsal (cuda)")
    given = parser.parse_args(arguments)
    machine = Machine(given.folder.resolve(), given.device, time.monotonic() + given.seconds)
    if given.device == "cuda" and not has_gpu():
        print("there is no GPU here: nvidia-smi does not answer; --device cpu rehearses everything", file=sys.stderr)
        return NO_GPU
    machine.install(given.luggage.resolve())
    todo = [name for name in given.only if given.again or not machine.report.is_done(name)]
    while todo:
        try:
            machine.run(todo[0])
        except subprocess.TimeoutExpired:
            break
        del todo[0]
    machine.write()
    print(markdown(machine.report.parts, tests()))
    for line in failed(machine.report.parts):
        print(f"not as it should be: {line}")
    if todo:
        print(f"left for the next run: {', '.join(todo)}")
        return LEFT
    return FAILED if failed(machine.report.parts) else DONE


if __name__ == "__main__":
    sys.exit(main())

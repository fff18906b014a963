"""The command line without a server: help, flags, near misses, exit codes, what is
imported.
"""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rich_click as click
import trio

from infinistore import errors
from infinistore.addresses import refuse_password
from infinistore.cli.failures import EXIT_CODES, answered
from infinistore.cli.output import print_json, print_line
from infinistore.cli.root import COMMANDS, run
from infinistore.config import load_server_config, server_settings
from infinistore.disk_io import open_folder
from infinistore.settings import markdown_table
from tests.cli.conftest import Run
from tests.cli.in_process import written

DOCS = Path(__file__).parents[2] / "docs"

# As the original InfiniStore's server takes them.
ORIGINAL_FLAGS = [
    *("--auto-increase", "--host", "127.0.0.1", "--manage-port", "18080", "--service-port", "22345"),
    *("--log-level", "warning", "--prealloc-size", "16", "--dev-name", "mlx5_1", "--ib-port", "1"),
    *("--link-type", "IB", "--minimal-allocate-size", "64", "--evict-interval", "5"),
    *("--evict-min-threshold", "0.6", "--evict-max-threshold", "0.8", "--enable-periodic-evict"),
    *("--hint-gid-index", "-1"),
]


def test_every_flag_of_the_original_is_accepted_with_its_meaning() -> None:
    config = load_server_config(written(*ORIGINAL_FLAGS), environment={})
    assert (config.prealloc_bytes, config.minimal_allocate_bytes) == (16 << 30, 64 << 10)
    assert (config.auto_increase, config.enable_periodic_evict) == (True, True)
    assert (config.dev_name, config.link_type, config.ib_port, config.hint_gid_index) == ("mlx5_1", "IB", 1, -1)
    assert (config.evict_interval_s, config.evict_min_threshold, config.evict_max_threshold) == (5, 0.6, 0.8)
    assert (config.host, config.service_port, config.manage_port) == ("127.0.0.1", 22345, 18080)
    assert config.log_level == "warning"


def test_a_switch_can_be_turned_on_and_off_and_left_to_the_environment() -> None:
    def auto_increase(*flags: str) -> bool:
        serve = written(*flags)
        return load_server_config(serve, environment={"INFINISTORE_AUTO_INCREASE": "on"}).auto_increase

    assert auto_increase("--auto-increase") is True
    assert auto_increase("--no-auto-increase") is False
    assert auto_increase() is True
    assert load_server_config(written(), environment={}).auto_increase is False


def test_every_setting_has_a_flag_and_none_is_set_unless_given() -> None:
    assert written() == dict.fromkeys(setting.key for setting in server_settings())


def test_the_table_of_settings_in_the_documentation_is_that_of_the_code() -> None:
    text = (DOCS / "configuration.md").read_text()
    assert markdown_table(server_settings()).strip() in text, "put the output of `infinistore help settings` there"


def test_the_exit_codes_in_the_documentation_are_those_of_the_code() -> None:
    text = (DOCS / "command-line.md").read_text()
    for code, meaning in EXIT_CODES.items():
        assert f"| {code} | {meaning} |" in text


def test_every_command_is_documented() -> None:
    text = (DOCS / "command-line.md").read_text()
    assert [name for name in COMMANDS if f"infinistore {name}" not in text] == []


def test_help_shows_the_commands_and_a_first_session(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf"^\W*{name}\s", shown, re.MULTILINE), name
    assert "infinistore --prealloc-size 512MiB &" in shown
    assert "infinistore help exit-codes" in " ".join(shown.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    direct = capsys.readouterr().out
    assert run(["help", name]) == 0
    assert capsys.readouterr().out == direct
    assert f"Usage: infinistore {name}" in direct


def test_the_help_of_the_server_shows_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    assert [setting.flag for setting in server_settings() if f"{setting.flag} " not in shown] == []
    assert run(["--service-port", "1", "--help"]) == 0
    assert "--service-port" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--servce-port 1", "there is no flag --servce-port; did you mean --service-port?"),
        ("serve --prealoc-size 1", "there is no flag --prealoc-size; did you mean --prealloc-size?"),
        ("ls --limt 1", "there is no flag --limt; did you mean --limit?"),
        ("--bogus", "there is no flag --bogus; see `infinistore serve --help`"),
        ("--url tcp://a stat", "flags follow the command: infinistore stat --url; see `infinistore --help`"),
        ("--url=tcp://a stat", "flags follow the command: infinistore stat --url"),
        ("sta", "there is no command 'sta'; did you mean stat?"),
        ("demo --input /does/not/exist", "cannot read /does/not/exist: No such file or directory"),
        ("demo --pool-size 1MiB", "the pool of 1 MiB is too small"),
        ("disk", "name a command: inspect, verify, wipe; see `infinistore disk --help`"),
        ("tenant", "name a command: "),
        ("cluster", "name a command: "),
        ("help cluster drian", "there is no help on 'cluster drian'; did you mean drain?"),
        ("help disk wipe now", "there is no help on 'disk wipe now'"),
        ("xyzzy", "there is no command 'xyzzy'; see `infinistore --help`"),
        ("help exit-code", "there is no help on 'exit-code'; did you mean exit-codes?"),
        ("--service-port lots", "--service-port lots: must be a whole number between 0 and 65535"),
        ("--host 0.0.0.0", "--token-file"),
        ("--config /does/not/exist", "cannot read the configuration file /does/not/exist: No such file or directory"),
        ("--token-file /does/not/exist --service-port 0", "cannot read the token file /does/not/exist"),
        ("--allocator bitmpa", "did you mean 'bitmap'?"),
        ("--service-port", "--service-port"),
        ("put", "missing argument 'KEY'; see `infinistore put --help`"),
        ("put key /does/not/exist", "/does/not/exist: No such file or directory"),
        ("put key --block-size 0", "0 must be at least one byte"),
        ("get " + "k" * 1025, "the key has 1025 bytes; at most 1024 are allowed"),
        ("rm", "name the keys to delete, or give --prefix PREFIX"),
        ("rm a --prefix b", "name the keys to delete, or give --prefix PREFIX"),
        ("purge", "add --yes"),
        ("evict --min 0.9", "--min 0.9 must not be above --max 0.8"),
        ("ls --limit 0", "0 is not in the range x>=1"),
        ("stat --url infinistor://a", "did you mean infinistore or infinistores?"),
        ("stat --url infinistore://a?deadline=1", "did you mean deadline_s?"),
        ("bench --sizes 4KiB,lots", "lots is not a size"),
        ("bench --embedded --path tcp", "leave it out with --embedded"),
        ("completion tcsh", "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy_and_exit_code_2(command: Run, arguments: str, line: str) -> None:
    ended = command(*arguments.split())
    text = ended.stderr.decode()
    assert line in text.lower() or line in text
    assert text.startswith("infinistore: ")
    assert text.count("\n") == 1
    assert (ended.returncode, ended.stdout) == (2, b"")


def test_a_path_of_a_key_with_other_bytes_than_utf8_is_refused(command: Run) -> None:
    ended = command("get", b"\xff\xfe")
    assert ended.returncode == 2
    assert b"which is not text" in ended.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.KeyNotFound("x"), 1),
        (errors.ConfigError("x"), 2),
        (errors.InvalidRequest("x"), 2),
        (FileNotFoundError(2, "No such file", "x"), 2),
        (errors.StoreUnavailable("x"), 3),
        (errors.AuthenticationFailed("x"), 3),
        (errors.VersionMismatch("x"), 3),
        (errors.ProtocolError("x"), 3),
        (errors.DeadlineExceeded("x"), 4),
        (errors.OutOfMemory("x"), 5),
        (errors.ValueTooLarge("x"), 5),
        (errors.LimitExceeded("x"), 5),
        (errors.ChecksumMismatch("x"), 6),
        (errors.InfiniStoreException("x"), 70),
        (ZeroDivisionError("x"), 70),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (BaseExceptionGroup("", [ExceptionGroup("", [errors.DeadlineExceeded("x")])]), 4),
        (BaseExceptionGroup("", [ValueError("x"), BaseExceptionGroup("", [KeyboardInterrupt()])]), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_each_error_has_its_exit_code_and_one_line(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("INFINISTORE_LOG_LEVEL", raising=False)
    assert answered([], _raise(error)) == code
    assert code in EXIT_CODES
    shown = capsys.readouterr().err
    assert shown.count("\n") == (0 if code == 130 else 1)
    assert "Traceback" not in shown


def test_a_traceback_is_shown_for_debug_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFINISTORE_LOG_LEVEL", "debug")
    assert answered([], _raise(errors.StoreUnavailable("gone"))) == 3
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.endswith("infinistore: gone\n")


def _raise(error: BaseException) -> Callable[..., int]:
    def invoke(*arguments: object) -> int:
        raise error

    return invoke


def test_the_flag_log_level_debug_shows_a_traceback(command: Run) -> None:
    ended = command("stat", "--url", "unix:///does/not/exist", "--log-level", "debug")
    assert ended.returncode == 3
    assert b"Traceback" in ended.stderr


@pytest.mark.parametrize("arguments", [("--allocator", "none-such"), ("exists", "a", "--url", "unix:///no")], ids=str)
def test_a_misspelt_variable_is_mentioned_by_every_command(command: Run, arguments: tuple[str, ...]) -> None:
    ended = command(*arguments, env={"INFINISTORE_SERVCE_PORT": "1"})
    assert b"INFINISTORE_SERVCE_PORT means nothing here; did you mean INFINISTORE_SERVICE_PORT?" in ended.stderr


def test_a_variable_that_kubernetes_sets_is_named_with_the_remedy(command: Run) -> None:
    ended = command(env={"INFINISTORE_MANAGE_PORT": "tcp://10.0.0.1:18080"})
    assert ended.returncode == 2
    assert b"between 0 and 65535, or off; Kubernetes sets it" in ended.stderr
    assert b"enableServiceLinks: false" in ended.stderr


@pytest.mark.parametrize(
    "url",
    [
        "infinistore+etcd://user:secret@host/c",
        "infinistore+etcd://host,user:secret@host/c",
        "infinistore+etcd://user:/secret@host/c",
        "infinistore+etcd://user:?secret@host/c",
        "infinistore+etcd://host/c?etcd_user=user&etcd_password=secret",
        "infinistore+etc://user:secret@host/c",
        "user:secret@host",
        "tcp://user:secret@host",
        "tcp://host?token=secret",
    ],
)
@pytest.mark.parametrize("arguments", [("--cluster",), ("stat", "--url")], ids=" ".join)
def test_a_password_in_a_url_is_not_shown(command: Run, arguments: tuple[str, ...], url: str) -> None:
    ended = command(*arguments, url)
    assert ended.returncode == 2
    assert b"secret" not in ended.stderr


@pytest.mark.parametrize("url", ["tcp://host?name=me@here", "unix:///run/a@b.sock"])
def test_an_at_sign_elsewhere_is_no_password(url: str) -> None:
    refuse_password(url)


def test_what_a_console_cannot_show_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    def show(*_: object) -> int:
        print_line("schlüssel")
        print_json({"key": "schlüssel"})
        return 0

    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    assert answered([], show) == 0
    line, document = written.getvalue().splitlines()
    assert line == rb"schl\xfcssel"
    assert json.loads(document) == {"key": "schlüssel"}


def test_what_is_kept_in_memory_has_every_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", written := io.StringIO())
    print_json({"key": "schlüssel"})
    assert written.getvalue() == '{"key": "schlüssel"}\n'


def test_version_names_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert re.fullmatch(r"infinistore \d+\.\d+\S*\n", capsys.readouterr().out)


def test_help_takes_the_path_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "cluster", "drain"]) == 0
    assert "infinistore cluster drain" in capsys.readouterr().out


def test_help_exit_codes_lists_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "exit-codes"]) == 0
    shown = capsys.readouterr().out
    assert [int(line.split()[0]) for line in shown.splitlines()] == list(EXIT_CODES)


# In children of one process, which has imported nothing.
_IMPORTED = """
import os, sys
from infinistore.cli.root import run
for arguments in sys.argv[1:]:
    if os.fork() == 0:
        run(arguments.split())
        print(arguments, *sys.modules, sep=",", file=sys.stderr)
        break
    os.wait()
"""


def test_settings_are_checked_with_the_files_that_they_name_and_nothing_is_opened(
    command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trio, "run", lambda *_: pytest.fail("runs"))
    (tmp_path / "server.yaml").write_text("tenants: tenants.yaml\n")
    ended = command("serve", "--check", "--config", "server.yaml")
    assert ended.returncode == 2
    assert ended.stderr.startswith(b"infinistore: tenants.yaml: cannot be read: No such file")
    (tmp_path / "tenants.yaml").write_text("tenants: 5\n")
    ended = command("--check", "--config", "server.yaml")
    assert ended.returncode == 2
    (tmp_path / "token").write_text("a token")
    ended = command("--check", "--token-file", "token")
    assert (ended.returncode, b"white space" in ended.stderr) == (2, True)
    (tmp_path / "token").write_text("token")
    (tmp_path / "token").chmod(0o600)
    ended = command("--check", "--token-file", "token")
    assert (ended.returncode, ended.stdout) == (0, b"the settings and the files that they name can be used\n")


def test_a_check_reads_the_file_of_a_cluster_and_looks_at_disks_and_changes_nothing(
    command: Run, tmp_path: Path
) -> None:
    settings = ["--cluster", f"infinistore+file://{tmp_path}/nodes", "--node-id", "b", "--disk", f"{tmp_path}/d:1GiB"]

    def check(*more: str) -> tuple[int, Any]:
        ended = command("serve", "--check", "--json", *settings, *more)
        return ended.returncode, json.loads(ended.stdout)  # one document, whatever the outcome

    missing = f"--cluster: {tmp_path}/nodes cannot be read: No such file or directory"
    assert check() == (2, {"ok": False, "problem": missing, "notes": []})
    (tmp_path / "nodes").write_text('{"nodes": 5}')
    assert check()[1]["problem"] == f'--cluster: {tmp_path}/nodes must have a list of "nodes"'
    (tmp_path / "nodes").write_text('{"nodes": [{"id": "a", "address": "10.0.0.1:22345"}]}')
    unlisted = f"{tmp_path}/nodes does not list b (--node-id), but a"
    assert check() == (0, {"ok": True, "problem": None, "notes": [unlisted]})
    code, told = check("--eviction", "by-mood")
    assert (code, told["ok"], "by-mood" in told["problem"]) == (2, False, True)
    assert sorted(os.listdir(tmp_path)) == ["nodes"]
    folder = open_folder(tmp_path / "d")
    _, told = check()
    folder.close()
    assert "is in use by this process" in told["notes"][1]
    ended = command("serve", "--check", *settings)
    assert (ended.returncode, ended.stdout) == (0, b"the settings and the files that they name can be used\n")
    assert ended.stderr.decode() == f"infinistore: {unlisted}\n"
    (tmp_path / "d" / "disk").write_text("of another program" * 1000)
    assert check()[0] == 2


@pytest.mark.process
def test_help_imports_neither_the_event_loop_nor_the_engine() -> None:
    asked = ["--help", "serve --help", "put --help", "help settings"]
    ended = subprocess.run([sys.executable, "-c", _IMPORTED, *asked], capture_output=True, check=True)
    imports = dict(line.split(",", 1) for line in ended.stderr.decode().splitlines())
    assert list(imports) == asked
    heavy = {"trio", "asyncio", "cattrs", "yaml", "msgpack", "bitarray", "xxhash", "numpy", "torch", "rich.progress"}
    engine = ("infinistore.core", "infinistore.server", "infinistore.client")
    for imported in imports.values():
        assert [name for name in imported.split(",") if name in heavy or name.startswith(engine)] == []


@pytest.mark.parametrize("shell", [pytest.param("bash", marks=pytest.mark.process), "zsh", "fish"])
def test_completion_prints_a_script_for_each_shell(shell: str, command: Run) -> None:
    ended = command("completion", shell)
    assert ended.returncode == 0
    assert b"_INFINISTORE_COMPLETE" in ended.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("infinistore be", "bench"),
        ("infinistore --prea", "--prealloc-size"),
        ("infinistore serve --link-type E", "Ethernet"),
    ],
)
def test_a_shell_gets_completions(words: str, expected: str, command: Run) -> None:
    count = len(words.split()) - 1
    variables = {"_INFINISTORE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    ended = command(env=variables)
    assert ended.returncode == 0
    assert f"plain,{expected}" in ended.stdout.decode().split()

"""The image and the compose file: what they say, and, as root where buildah and
debootstrap are, an image that is built and run.

No registry of images is needed: Debian's packages make the base.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import yaml

from infinistore.cli.route import command as route
from infinistore.client.options import parse_url
from infinistore.config import load_server_config
from infinistore.integrations.vllm.settings import ConnectorSettings
from tests.bad_days.servers import running_server_process
from tests.http_servers import Quiet, serving_http
from tests.ports import own_ports

PROJECT = Path(__file__).resolve().parents[2]
CONTAINER = PROJECT / "deploy" / "container"
COMPOSE = yaml.safe_load((CONTAINER / "compose.yaml").read_text())
ENGINE = yaml.safe_load((CONTAINER / "vllm.compose.yaml").read_text())
FLEET = yaml.safe_load((CONTAINER / "fleet.compose.yaml").read_text())
ISOLATED = "--isolation=chroot"

builds_images = pytest.mark.skipif(
    not os.environ.get("INFINISTORE_TEST_DEPLOY")
    or (
        "INFINISTORE_RELEASE" not in os.environ  # which fails without
        and (os.getuid() != 0 or not all(map(shutil.which, ("buildah", "debootstrap"))))
    ),
    reason="`make test-deploy` runs this, as root, where buildah and debootstrap are installed",
)


def test_the_server_of_the_compose_file_has_settings_that_exist_and_memory_for_its_pool(tmp_path: Path) -> None:
    service = COMPOSE["services"]["infinistore"]
    (tmp_path / "token").write_text("secret")
    variables = service["environment"] | {"INFINISTORE_TOKEN_FILE": str(tmp_path / "token")}
    serve, *flags = service["command"]
    given = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(flags[::2], flags[1::2], strict=True)
    }

    config = load_server_config(given, environment=variables)

    assert serve == "serve"
    assert service["ports"] == [f"127.0.0.1:{port}:{port}" for port in (config.service_port, config.manage_port)]
    assert int(service["mem_limit"].removesuffix("m")) << 20 >= config.prealloc_bytes * 1.05
    assert int(service["stop_grace_period"].removesuffix("s")) > config.drain_timeout_s


def test_every_file_that_the_compose_file_mounts_exists() -> None:
    mounted = [volume for service in COMPOSE["services"].values() for volume in service.get("volumes", [])]
    files = [one.split(":")[0] for one in mounted if one.startswith(".")]
    assert len(files) == 5
    assert [one for one in files if not (CONTAINER / one).is_file()] == []
    named = {one.split(":")[0] for one in mounted if not one.startswith(".")}
    assert named == COMPOSE["volumes"].keys()


def test_prometheus_scrapes_the_job_that_the_alerts_are_about() -> None:
    (job,) = yaml.safe_load((CONTAINER / "prometheus.yml").read_text())["scrape_configs"]
    alerts = (PROJECT / "docs" / "operations" / "prometheus-alerts.yml").read_text()
    assert f'job="{job["job_name"]}"' in alerts
    token = COMPOSE["services"]["infinistore"]["environment"]["INFINISTORE_TOKEN_FILE"]
    assert job["authorization"] == {"credentials_file": token}
    assert COMPOSE["services"]["prometheus"]["secrets"] == ["token"]
    assert job["static_configs"][0]["targets"] == [f"infinistore:{load_server_config(environment={}).manage_port}"]


def test_no_service_has_rights_that_it_does_not_need() -> None:
    for service in [one for file in (COMPOSE, ENGINE, FLEET) for one in file["services"].values()]:
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert COMPOSE["services"]["infinistore"]["read_only"] is True
    assert FLEET["services"]["router"]["read_only"] is True


def test_only_the_group_of_the_token_may_read_it_beside_its_owner() -> None:
    services = COMPOSE["services"] | ENGINE["services"] | FLEET["services"]
    reading = {name for name, service in services.items() if "token" in service.get("secrets", [])}
    assert reading == {"infinistore", "prometheus", "vllm", "engine-0", "engine-1", "router"}
    assert all(services[name]["group_add"][-1].startswith("${TOKEN_GROUP") for name in reading)


ENGINES = {name: service for file in (ENGINE, FLEET) for name, service in file["services"].items() if name != "router"}


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_of_a_compose_file_is_one_of_the_servers_clients_by_shared_memory(name: str) -> None:
    engine = ENGINES[name]
    server = COMPOSE["services"]["infinistore"]
    settings = json.loads(engine["command"][-1])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("INFINISTORE_URL", engine["environment"]["INFINISTORE_URL"])
        connector = ConnectorSettings.from_extra_config(settings.get("kv_connector_extra_config", {}))
    url = parse_url(connector.url)
    folder = os.path.dirname(url.path)
    assert (url.scheme, f"sockets:{folder}" in engine["volumes"], f"sockets:{folder}" in server["volumes"]) == (
        "shm", True, True,
    )  # fmt: skip
    assert url.options == {"token_file": server["environment"]["INFINISTORE_TOKEN_FILE"]}
    assert f"INFINISTORE_UNIX_SOCKET={url.path}" in (CONTAINER / "Dockerfile").read_text()
    assert f"--gid {engine['group_add'][0]} infinistore" in (CONTAINER / "Dockerfile").read_text()


def test_the_router_of_the_compose_file_has_settings_that_exist_and_the_engines_beside_it() -> None:
    services = FLEET["services"]
    router = services["router"]
    name, *flags = router["command"]
    settings = route.make_context(name, list(flags)).params
    engines = [one for one in services if one != "router"]
    assert (name, list(settings["engines"])) == ("route", [f"http://{one}:8000" for one in engines])
    assert router["ports"] == [f"127.0.0.1:{settings['port']}:{settings['port']}"]
    assert int(router["stop_grace_period"].removesuffix("s")) > settings["drain_timeout"]
    assert router["image"] == COMPOSE["services"]["infinistore"]["image"]
    secrets = {f"/run/secrets/{one}" for one in router["secrets"]}
    assert {str(settings["token_file"]), str(settings["engine_key_file"])} == secrets
    assert settings["token_file"] != settings["engine_key_file"]
    url = parse_url(router["environment"]["INFINISTORE_URL"])
    assert url.options == {"token_file": COMPOSE["services"]["infinistore"]["environment"]["INFINISTORE_TOKEN_FILE"]}
    assert (url.host, url.port) == ("infinistore", load_server_config(environment={}).service_port)


def test_each_engine_of_the_fleet_has_a_gpu_and_wants_the_key_that_the_router_shows() -> None:
    engines = {name: service for name, service in FLEET["services"].items() if name != "router"}
    devices = [one["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for one in engines.values()]
    assert devices == [["0"], ["1"]]
    shown = route.make_context("route", FLEET["services"]["router"]["command"][1:]).params["engine_key_file"]
    for engine in engines.values():
        shell, flag, script, called = engine["entrypoint"]
        assert (shell, flag, called) == ("sh", "-c", "vllm")
        assert f"VLLM_API_KEY=$$(cat {shown}) exec vllm serve" in script
        assert "ports" not in engine


def test_what_the_image_copies_is_let_through_to_the_build() -> None:
    dockerfile = (CONTAINER / "Dockerfile").read_text()
    copied = " ".join(re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile, flags=re.MULTILINE))
    ignored = (PROJECT / ".dockerignore").read_text().splitlines()
    assert sorted(line[1:] for line in ignored if line.startswith("!")) == sorted(copied.split())


# Its health check

PROBE = ["python3", "-S", "/opt/healthcheck.py"]


def ask(environment: dict[str, str], *arguments: str) -> str:
    """What the health check says of a server with this environment and command."""
    check: Callable[..., str] = runpy.run_path(str(CONTAINER / "healthcheck.py"))["check"]
    return check(environment, ["tini", "--", "infinistore", *arguments, ""])


@contextmanager
def managed(*flags: str) -> Iterator[str]:
    """The port of the management API of a server with these flags."""
    (port,) = own_ports(1)
    with running_server_process(*flags, "--manage-port", str(port)):
        yield str(port)


@contextmanager
def answering(status: int) -> Iterator[int]:
    """The port of a server that answers GET /health with a status, others with 404."""

    class Own(Quiet, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

    with serving_http(Own) as port:
        yield port


def test_the_health_check_of_the_image_is_the_one_that_it_copies() -> None:
    dockerfile = (CONTAINER / "Dockerfile").read_text()
    assert f"CMD {json.dumps(PROBE)}" in dockerfile
    assert "COPY deploy/container/healthcheck.py /opt/healthcheck.py" in dockerfile


def test_a_server_on_another_port_is_healthy_wherever_the_port_is_said() -> None:
    with managed() as port:
        assert ask({"INFINISTORE_MANAGE_PORT": port}) == ""
        assert ask({}, "serve", "--manage-port", port) == ""
        assert ask({"INFINISTORE_MANAGE_PORT": "1"}, "serve", f"--manage-port={port}") == ""
        assert ask({"INFINISTORE_MANAGE_PORT": port, "INFINISTORE_MANAGE_HOST": "0.0.0.0"}) == ""
        assert ask({"INFINISTORE_MANAGE_PORT": port, "http_proxy": "http://127.0.0.1:1"}) == ""


def test_a_server_with_tls_is_healthy_also_if_only_a_configuration_file_says_so(tmp_path: Path) -> None:
    pytest.importorskip("trustme", reason="`make test` runs this")
    from tests.transports.certificates import issue

    files = issue(tmp_path)
    with managed("--tls-cert", str(files.cert), "--tls-key", str(files.key)) as port:
        assert ask({"INFINISTORE_MANAGE_PORT": port, "INFINISTORE_TLS_CERT": str(files.cert)}) == ""
        assert ask({}, "serve", "--manage-port", port, "--tls-cert", str(files.cert)) == ""
        assert ask({"INFINISTORE_MANAGE_PORT": port}) == ""


def test_the_health_check_of_the_fleet_is_told_by_the_status_of_the_answer() -> None:
    checks = [service["healthcheck"]["test"] for service in FLEET["services"].values()]
    assert all(check == checks[0] for check in checks)
    command, _, *arguments, script = checks[0]
    assert (command, arguments) == ("CMD", ["-S", "-c"])
    for status, code in (200, 0), (503, 1):
        with answering(status) as port:
            done = subprocess.run([sys.executable, *arguments, script.replace("8000", str(port))], check=False)
        assert done.returncode == code


def test_a_server_that_does_not_answer_or_cannot_be_asked_is_unhealthy() -> None:
    (port,) = own_ports(1)
    assert "Connection refused" in ask({"INFINISTORE_MANAGE_PORT": str(port)})
    assert "--no-healthcheck" in ask({"INFINISTORE_MANAGE_PORT": "off"})
    assert "does not answer" in ask({"INFINISTORE_MANAGE_PORT": "none"})


# An image


def run(*command: str | Path, timeout_s: float = 600) -> str:
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=timeout_s)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The command, with a storage of its own."""
    place = tmp_path_factory.mktemp("storage")
    yield ["buildah", "--root", str(place / "root"), "--runroot", str(place / "run"), "--storage-driver", "vfs"]
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="module")
def image(buildah: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The image, on a base of Debian's packages, built by the Dockerfile as it is."""
    place = tmp_path_factory.mktemp("image")
    (PROJECT / "dist").mkdir(exist_ok=True)
    for old in (PROJECT / "dist").glob("*.whl"):
        old.unlink()
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel")
    run("debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", place / "base")
    base = run(*buildah, "from", "scratch").strip()
    run(*buildah, "add", "--quiet", base, place / "base", "/")
    run(*buildah, "commit", "--quiet", "--rm", base, "localhost/base")
    shutil.rmtree(place / "base")
    # This machine's certificates: its way to PyPI may need them.
    certificates = ["--volume", "/etc/ssl/certs:/etc/ssl/certs:ro"] if Path("/etc/ssl/certs").is_dir() else []
    flags = [ISOLATED, "--pull-never", "--format=docker", "--build-arg", "BASE=localhost/base", *certificates]
    run(*buildah, "bud", *flags, "--file", CONTAINER / "Dockerfile", "--tag", "localhost/infinistore", ".")
    return "localhost/infinistore"


SERVES_WITH_A_ROOT_THAT_IS_READ_ONLY = """
set -e
mount --bind "$1" "$1"
mount -o remount,ro,bind "$1"
mount -t proc proc "$1/proc"
mount -t tmpfs -o mode=1777 tmpfs "$1/tmp"
mount -t tmpfs -o uid=10001,gid=10001,mode=0750 tmpfs "$1/run/infinistore"
inside=(chroot --userspec=10001:10001 "$1" env -i PATH=/opt/infinistore/bin:/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1)
inside+=(INFINISTORE_UNIX_SOCKET=/run/infinistore/infinistore.sock INFINISTORE_UNIX_SOCKET_ACCESS=group)
inside+=("INFINISTORE_MANAGE_PORT=$2")
"${inside[@]}" tini -s -- infinistore serve --service-port 0 --prealloc-size 64MiB &
"${inside[@]}" infinistore selftest --url shm:///run/infinistore/infinistore.sock --wait 60
"${inside[@]}" python3 -S /opt/healthcheck.py && echo HEALTHY
"${inside[@]}" sh -c 'touch /opt/infinistore/file 2>/dev/null && echo WRITABLE; id -u'
kill "$!"
wait "$!"
echo "tini ended with $?"
"""


@builds_images
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_image_runs_the_self_test_as_a_user_of_its_own(buildah: list[str], image: str) -> None:
    container = run(*buildah, "from", "--pull-never", image).strip()
    inside = [*buildah, "run", ISOLATED, container, "--"]
    assert run(*inside, "id", "-u").strip() == "10001"
    assert "is gone" in run(*inside, "infinistore", "selftest", "--embedded")
    assert run(*inside, "infinistore", "--version").strip()
    owned = run(*inside, "sh", "-c", "find / -xdev -writable -type d -not -path '/proc/*' 2>/dev/null || true").split()
    assert set(owned) <= {
        "/run/infinistore",
        "/var/lib/infinistore",
        "/tmp",
        "/var/tmp",
        "/run/lock",
        "/dev",
        "/dev/shm",
    }
    config = json.loads(run(*buildah, "inspect", "--type", "image", image))["Docker"]["config"]
    assert (config["User"], config["Entrypoint"]) == ("10001:10001", ["tini", "--", "infinistore"])
    command, *probe = config["Healthcheck"]["Test"]
    assert (command, probe) == ("CMD", PROBE)
    asked = run(*inside, "sh", "-c", f"INFINISTORE_MANAGE_PORT=1 {' '.join(probe)} 2>&1 || echo UNHEALTHY").split("\n")
    assert "does not answer: [Errno 111] Connection refused" in asked[0]
    assert asked[1] == "UNHEALTHY"
    run(*buildah, "rm", container)


@builds_images
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_server_in_the_image_needs_no_root_file_system_that_it_can_write(buildah: list[str], image: str) -> None:
    container = run(*buildah, "from", "--pull-never", image).strip()
    root = run(*buildah, "mount", container).strip()
    command = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "bash",
        "-c",
        SERVES_WITH_A_ROOT_THAT_IS_READ_ONLY,
        "bash",
        root,
        str(own_ports(1)[0]),
    ]
    said = run(*command, timeout_s=120)
    assert "is gone" in said
    assert "\nHEALTHY\n" in said
    assert "WRITABLE" not in said
    assert "\n10001\n" in said
    assert "tini ended with 0" in said

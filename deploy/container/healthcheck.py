"""Asks the server of this container whether it is ready: exit status 0 if it is.

Where the management API is, and whether it speaks TLS, is what the environment says and
the flags of the container's command, which is process 1. Whatever the answer to that is
for, the other way to speak is tried as well: a configuration file may name a
certificate. The certificate is not verified: it is for other names than loopback.
"""

import http.client
import os
import ssl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_TIMEOUT_S = 2.0
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def setting(name: str, default: str, environment: Mapping[str, str], arguments: Sequence[str]) -> str:
    """Return what a flag says, else the variable, else the default."""
    flag = "--" + name.replace("_", "-")
    for index in range(len(arguments) - 1, -1, -1):
        if arguments[index] == flag and index + 1 < len(arguments):
            return arguments[index + 1]
        if arguments[index].startswith(f"{flag}="):
            return arguments[index].partition("=")[2]
    return environment.get(f"INFINISTORE_{name.upper()}") or default


def status_of(host: str, port: int, *, tls: bool) -> int:
    """Return the status with which the server answers the probe.

    Raises:
        OSError, http.client.HTTPException: it does not answer, or not in this way.
    """
    connection = (
        http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=ssl._create_unverified_context())
        if tls
        else http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    )
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status
    finally:
        connection.close()


def check(environment: Mapping[str, str], arguments: Sequence[str]) -> str:
    """Return what is wrong with the server, or an empty text."""
    port = setting("manage_port", "18080", environment, arguments)
    if port == "off":
        return "there is no management API to ask: run the container with --no-healthcheck"
    host = setting("manage_host", "127.0.0.1", environment, arguments)
    tls = bool(setting("tls_cert", "", environment, arguments))
    problem = ""
    for way in (tls, not tls):
        try:
            status = status_of(_EVERYWHERE.get(host, host), int(port), tls=way)
        except (OSError, ValueError, http.client.HTTPException) as error:
            problem = problem or f"the management API at {host}:{port} does not answer: {error}"
            continue
        if status == http.client.OK:
            return ""
        if status == http.client.SERVICE_UNAVAILABLE:
            return "the server is not ready"
        problem = problem or f"the management API at {host}:{port} answers {status}"
    return problem


def command_of(process: Path) -> list[str]:
    """Return the arguments of a process; none if they cannot be read."""
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(check(os.environ, command_of(Path("/proc/1"))) or 0)

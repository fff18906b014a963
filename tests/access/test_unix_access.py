"""Who may open a Unix socket."""

import pytest

from infinistore.access.identity import UnixAccess
from infinistore.errors import AuthenticationFailed

OWNER, GROUP = 1000, 50


@pytest.mark.parametrize(
    ("mode", "uid", "groups", "lets_in"),
    [
        (0o600, OWNER, {7}, True),
        (0o600, 1001, {GROUP}, False),
        (0o600, 0, {7}, True),  # root may open anything
        (0o660, 1001, {GROUP}, True),
        (0o660, 1001, {7, GROUP}, True),
        (0o660, 1001, {7}, False),
        (0o666, 1001, {7}, True),
        (0o606, 1001, {GROUP}, False),  # as for files, the group decides for its members
        (0o060, OWNER, {GROUP}, False),
        (0o444, OWNER, {GROUP}, False),  # connecting is writing
    ],
)
def test_it_lets_in_whom_the_kernel_lets_open_a_file_of_this_mode(
    mode: int, uid: int, groups: set[int], lets_in: bool
) -> None:
    access = UnixAccess(OWNER, GROUP, mode)
    if lets_in:
        access.check(uid, groups)
        return
    with pytest.raises(AuthenticationFailed, match=f"user {uid} has connected; connect as one of them, or by TCP"):
        access.check(uid, groups)


def test_the_refusal_says_whom_the_socket_is_for() -> None:
    with pytest.raises(AuthenticationFailed, match="for user 1000, and user 7"):
        UnixAccess(OWNER, GROUP, 0o600).check(7, {7})
    with pytest.raises(AuthenticationFailed, match="for user 1000 and group 50, and user 7"):
        UnixAccess(OWNER, GROUP, 0o660).check(7, {7})

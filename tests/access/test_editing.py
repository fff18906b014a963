"""Edits of a tenants file: they do what was meant, and keep what others wrote."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinistore.access.tenants import digest_of
from infinistore.access.tenants_file import EMPTY_FILE, add_tenant, parse_tenants, remove_tenant, replace_tokens
from infinistore.errors import ConfigError

ONE, TWO, THREE = (digest_of(str(number)) for number in range(3))
FILE = f"""\
# Who may come. Ask Ada before you change it.
groups: {{team: 1GiB}}

tenants:
  # the engines of team A
  alice:
    group: team   # since May
    tokens:
      - {ONE}  # rack 1
      - {TWO}  # rack 2

  bob:  # nobody knows why
    group: team
    weight: 2

  # operators
  ops: {{group: team, roles: [admin]}}
# the end
"""


def add(text: str, name: str, **keys: str) -> str:
    return add_tenant(text, "t", name, THREE, keys=keys, note="today")


def test_the_first_tenant_of_a_new_file() -> None:
    text = add(EMPTY_FILE, "alice", roles="[read]")
    assert text == EMPTY_FILE.replace(
        "tenants: {}\n", f"tenants:\n  alice:\n    tokens:\n      - {THREE}  # today\n    roles: [read]\n"
    )


def test_one_more_comes_last_and_nothing_else_changes() -> None:
    text = add(FILE, "carol", group="team")
    entry = f"  carol:\n    tokens:\n      - {THREE}  # today\n    group: team\n"
    assert text == FILE.replace("# the end", entry + "# the end")


def test_new_tokens_take_the_place_of_old_ones_and_keep_the_comments_of_those_that_stay() -> None:
    text = replace_tokens(FILE, "t", "alice", [TWO, THREE], "today")
    assert text == FILE.replace(f"      - {ONE}  # rack 1\n", "").replace(
        "# rack 2\n", f"# rack 2\n      - {THREE}  # today\n"
    )
    assert replace_tokens(FILE, "t", "alice", []) == FILE.replace(
        f"    tokens:\n      - {ONE}  # rack 1\n      - {TWO}  # rack 2\n", "    tokens: []\n"
    )


def test_a_tenant_without_tokens_gets_one() -> None:
    text = replace_tokens(FILE, "t", "bob", [THREE])
    assert text == FILE.replace("why\n", f"why\n    tokens:\n      - {THREE}\n")


def test_a_tenant_is_removed_with_its_lines_only() -> None:
    text = remove_tenant(FILE, "t", "alice")
    assert text.splitlines() == [*FILE.splitlines()[:5], *FILE.splitlines()[10:]]
    assert remove_tenant(add(EMPTY_FILE, "a"), "t", "a") == EMPTY_FILE


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tenants: {alice: {}}", "is not written as this command can edit it"),
        (FILE, "there is a tenant alice; `infinistore tenant rotate alice` gives it a token"),
    ],
)
def test_what_cannot_be_added_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        add(text, "alice", group="team") if text is FILE else add(text, "carol")


def test_what_cannot_be_edited_is_refused() -> None:
    with pytest.raises(ConfigError, match="not written as this command can edit it"):
        replace_tokens(FILE, "t", "ops", [THREE])
    with pytest.raises(ConfigError, match="there is no tenant nobody"):
        replace_tokens(FILE, "t", "nobody", [THREE])
    with pytest.raises(ConfigError, match="t:1: tenants must hold lines"):
        add("tenants:\n", "alice")


comments = st.text(alphabet="ab #:-[]'", max_size=8).map(lambda text: f"# {text}")
line_ends = st.text(alphabet="\r\x85\u2028\u2029", max_size=2)  # YAML begins a line behind each of these, too


@st.composite
def files(draw: st.DrawFn) -> str:
    """Files in block style, with comments and blank lines anywhere, of any indent, with
    any ends of lines.
    """
    indent = " " * draw(st.integers(1, 4))
    lines = ["tenants:"]
    number = 0
    for name in draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True)):
        lines.append(f"{indent}{name}:")
        keys = draw(st.permutations(["tokens", "weight", "roles"]))
        for key in keys[: draw(st.integers(1, 3))]:
            if key == "tokens":
                count = draw(st.integers(0, 2))
                items = [digest_of(f"{name} {number + one}") for one in range(count)]
                if draw(st.booleans()) or not items:
                    lines.append(f"{indent * 2}tokens: [{', '.join(items)}]")
                else:
                    lines += [f"{indent * 2}tokens:", *(f"{indent * 3}- {item}" for item in items)]
            else:
                lines.append(f"{indent * 2}{key}: {'3' if key == 'weight' else '[read]'}")
    out = []
    for line in lines:
        out.append(line + draw(st.just("") | comments.map(lambda text: "  " + text)) + draw(line_ends))
        if "tokens:" not in line and not line.lstrip().startswith("-"):  # what is between tokens may go with them
            out += draw(st.lists(st.just("") | comments, max_size=2))
    return "\n".join(out) + "\n"


@settings(max_examples=25)
@given(files(), st.sampled_from("abcde"), st.lists(st.sampled_from([ONE, TWO, THREE]), max_size=2, unique=True))
def test_an_edit_changes_what_was_meant_and_loses_no_comment(text: str, name: str, digests: list[str]) -> None:
    before = parse_tenants(text).tenants
    if name not in before:
        after = parse_tenants(add(text, name)).tenants
        assert after.keys() == {*before, name}
        assert all(after[one] == before[one] for one in before)
        return
    edited = replace_tokens(text, "t", name, digests)
    after = parse_tenants(edited).tenants
    assert after[name].digests == tuple(digests)
    assert all(after[one] == before[one] for one in before if one != name)
    outside = [line for line in text.splitlines() if line.startswith("#")]
    left = [line for line in edited.splitlines() if line.startswith("#")]
    assert outside == left
    gone = parse_tenants(remove_tenant(text, "t", name)).tenants
    assert gone == {one: found for one, found in before.items() if one != name}

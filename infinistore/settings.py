"""What a setting is: one description from which flags, variables, file keys and
documentation derive.

A `Kind` reads one sort of value from text and refuses what cannot be used; a `Setting`
adds the name, the default and the sentence that explains it, and travels in the
metadata of an attrs field. `infinistore/config.py` holds the settings themselves.
Nothing here knows where a value came from: that is said by who reads them.
"""

import difflib
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import parse_qsl

import attrs

from infinistore.errors import ConfigError
from infinistore.sizes import format_size, parse_size

VARIABLE_PREFIX: Final = "INFINISTORE_"
_METADATA_KEY: Final = "infinistore.setting"
ADAPTIVE: Final = "adaptive"
Spin: TypeAlias = int | Literal["adaptive", "off"]
"""How long to spin, in microseconds; 0 is off."""
TRUE_WORDS: Final = ("1", "true", "yes", "on")
FALSE_WORDS: Final = ("0", "false", "no", "off")


@attrs.frozen
class Kind:
    """One sort of value.

    `parse` turns what a person wrote (text, or what YAML made of it) into the value;
    `check` refuses a value out of range. Both raise ValueError with half a sentence
    that follows the value: "must be between 1 and 65535".
    """

    metavar: str
    parse: Callable[[Any], Any]
    check: Callable[[Any], None] = lambda value: None
    choices: tuple[str, ...] = ()
    several: bool = False
    """Whether its flag may be given several times: `parse` takes a list, too."""


@attrs.frozen
class Setting:
    """One setting of a configuration class."""

    key: str
    """The name in a YAML file: lower case with underscores. Flag and variable derive
    from it.
    """
    kind: Kind
    group: str
    """The heading under which help and documentation list it."""
    help: str
    """What it does, in one or two sentences without a final full stop."""
    default_text: str
    """The default as a person would write it."""
    attribute: str = ""
    """The attribute of the configuration class that holds the value."""

    @property
    def flag(self) -> str:
        """The flag on the command line: `--service-port`."""
        return "--" + self.key.replace("_", "-")

    @property
    def negative_flag(self) -> str:
        """The flag that turns a switch off: `--no-auto-increase`."""
        return "--no-" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable: `INFINISTORE_SERVICE_PORT`."""
        return VARIABLE_PREFIX + self.key.upper()

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off, so that its flag takes no value and has a `--no-`
        twin.
        """
        return not self.kind.metavar


class RefusedSetting(ConfigError):
    """A value that cannot be used, or values that do not go together.

    `keys` are the settings concerned, the one to blame first; `problem` follows its
    name in the message.
    """

    def __init__(self, keys: tuple[str, ...], problem: str) -> None:
        super().__init__(f"{keys[0]}: {problem}")
        self.keys = keys
        self.problem = problem


def declare(
    kind: Kind,
    default: str | Callable[[], Any] | None,
    help_text: str,
    *,
    group: str,
    key: str = "",
    default_text: str = "",
    secret: bool = False,
) -> Any:
    """Return the attrs field of one setting.

    Without a `key` it is called as the field. `default` is text in the setting's own
    spelling, a function that works the default out, or None; the last two need a
    `default_text` for people. A `secret` value is neither shown by `repr` nor in a
    message.
    """
    setting = Setting(key, kind, group, help_text, default_text or str(default))
    metadata = {_METADATA_KEY: setting}

    def validate(instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if value is None and default is None:
            return
        try:
            kind.check(value)
        except ValueError as error:
            raise RefusedSetting(
                (key or attribute.name,), f"the value {error}" if secret else f"{value!r} {error}"
            ) from None

    if callable(default):
        return attrs.field(factory=default, validator=validate, metadata=metadata, repr=not secret)
    value = None if default is None else kind.parse(default)
    return attrs.field(default=value, validator=validate, metadata=metadata, repr=not secret)


def settings_of(config_class: type[attrs.AttrsInstance]) -> tuple[Setting, ...]:
    """Return the settings of a configuration class, in the order they are declared."""
    declared = [(field.metadata[_METADATA_KEY], field.name) for field in attrs.fields(config_class)]
    return tuple(attrs.evolve(one, key=one.key or name, attribute=name) for one, name in declared)


def markdown_table(settings: Iterable[Setting]) -> str:
    """Return the settings as tables in Markdown, one under each heading.
    `docs/configuration.md` holds them, and says how a flag names a variable and a key.
    """
    lines: list[str] = []
    for heading, group in itertools.groupby(settings, key=lambda setting: setting.group):
        lines += [f"### {heading}", "", "| Flag | Default | What it does |", "|---|---|---|"]
        for setting in group:
            value = " " + setting.kind.metavar.replace("|", "\\|") if setting.kind.metavar else ""
            lines.append(f"| `{setting.flag}{value}` | {setting.default_text} | {setting.help} |")
        lines.append("")
    return "\n".join(lines)


def near(name: str, known: Iterable[str], cutoff: float = 0.6, spell: Callable[[str], str] = str) -> str:
    """Return "; did you mean X or Y?" for the known names nearest to `name`, or an
    empty string if none is near. `spell` tells how a user writes a name.

    `cutoff` is how much alike they must be: 1 is the same.
    """
    found = difflib.get_close_matches(name, list(known), n=3, cutoff=cutoff)
    likeness = [difflib.SequenceMatcher(None, name, other).ratio() for other in found]
    found = [other for other, ratio in zip(found, likeness, strict=True) if ratio > likeness[0] - 0.1]
    return f"; did you mean {' or '.join(map(spell, found))}?" if found else ""


def url_options(url: str) -> dict[str, str]:
    """Return the options that follow the question mark of a URL, as texts.

    Raises:
        ConfigError: they cannot be read.
    """
    query = url.partition("?")[2].partition("#")[0]
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise ConfigError(f"the options in {url!r} cannot be read; write ?option=value&option=value") from None
    return dict(pairs)


def text(metavar: str = "NAME") -> Kind:
    """Any text that is not empty."""

    def parse(raw: Any) -> str:
        if not isinstance(raw, str) or not raw.strip():
            raise ValueError("must be text, and not empty")
        return raw.strip()

    return Kind(metavar, parse)


def choice(*names: str) -> Kind:
    """One of a few names, in any case."""
    by_lower_case = {name.lower(): name for name in names}

    def parse(raw: Any) -> str:
        if (name := by_lower_case.get(str(raw).strip().lower())) is None:
            raise ValueError(f"must be one of {', '.join(names)}{near(str(raw), names)}")
        return name

    def check(value: str) -> None:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(names)}{near(str(value), names)}")

    return Kind("|".join(names), parse, check, names)


def switch() -> Kind:
    """On or off."""

    def parse(raw: Any) -> bool:
        word = str(raw).strip().lower()
        if word in TRUE_WORDS:
            return True
        if word in FALSE_WORDS:
            return False
        raise ValueError("must be true or false")

    return Kind("", parse)


def integer(low: int, high: int | None, metavar: str = "N") -> Kind:
    """A whole number from `low` to `high`, both included; or from `low` on."""
    words = (
        f"must be a whole number, {low} or more" if high is None else f"must be a whole number between {low} and {high}"
    )

    def parse(raw: Any) -> int:
        try:
            return int(raw) if isinstance(raw, str) or type(raw) is int else _refuse()
        except ValueError:
            raise ValueError(words) from None

    def check(value: int) -> None:
        if type(value) is not int or value < low or (high is not None and value > high):
            raise ValueError(words)

    return Kind(metavar, parse, check)


def integer_or_off(low: int, high: int, metavar: str = "N") -> Kind:
    """A whole number from `low` to `high`, or off, which is None."""
    inner = integer(low, high, metavar)

    def parse(raw: Any) -> int | None:
        word = str(raw).strip().lower()
        if word in FALSE_WORDS and word != "0":  # YAML reads a bare `off` as false
            return None
        try:
            number: int = inner.parse(raw)
        except ValueError as error:
            raise ValueError(f"{error}, or off") from None
        return number

    def check(value: int | None) -> None:
        if value is not None:
            inner.check(value)

    return Kind(f"{metavar}|off", parse, check)


def spinning(high: int | None) -> Kind:
    """How long to spin: microseconds, up to `high` if there is one; adaptive; or off,
    which is 0.
    """
    inner = integer(0, high, "MICROSECONDS")

    def parse(raw: Any) -> Spin:
        word = str(raw).strip().lower()
        if word == ADAPTIVE:
            return ADAPTIVE
        if word in FALSE_WORDS:  # YAML reads a bare `off` as false
            return 0
        try:
            number: int = inner.parse(raw)
        except ValueError as error:
            raise ValueError(f"{error}, or {ADAPTIVE}, or off") from None
        return number

    def check(value: Spin) -> None:
        if value not in (ADAPTIVE, "off"):
            try:
                inner.check(value)
            except ValueError as error:
                raise ValueError(f"{error}, or {ADAPTIVE}, or off") from None

    return Kind(f"MICROSECONDS|{ADAPTIVE}|off", parse, check)


def number(low: float, high: float, metavar: str, unit: str = "", *, above: bool = False) -> Kind:
    """A number from `low` to `high`, both included; with `above`, not `low`.

    `unit` is a word for the message, such as "seconds".
    """
    limits = f"above {low:g}, at most {high:g}" if above else f"between {low:g} and {high:g}"
    words = f"must be a number{' of ' + unit if unit else ''} {limits}"

    def parse(raw: Any) -> float:
        try:
            return float(raw) if isinstance(raw, str | int | float) and not isinstance(raw, bool) else _refuse()
        except ValueError:
            raise ValueError(words) from None

    def check(value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(words)
        if above and value == low:
            raise ValueError(words)

    return Kind(metavar, parse, check)


def size(low_bytes: int, high_bytes: int, *, bare_unit_bytes: int, bare_unit: str, multiple_of_bytes: int = 1) -> Kind:
    """A size: a number in `bare_unit`, or one with its unit. The value is in bytes."""

    def parse(raw: Any) -> int:
        return parse_size(raw, bare_unit_bytes)

    def check(value: int) -> None:
        if not low_bytes <= value <= high_bytes:
            raise ValueError(
                f"must be between {format_size(low_bytes)} and {format_size(high_bytes)}; "
                f"a number without a unit is in {bare_unit}"
            )
        if value % multiple_of_bytes:
            raise ValueError(f"must be a multiple of {format_size(multiple_of_bytes)}")

    return Kind("SIZE", parse, check)


def path(metavar: str = "FILE") -> Kind:
    """A path; `~` is the home folder. Whether it is there is found when it is
    opened.
    """

    def parse(raw: Any) -> Path:
        if not isinstance(raw, str | Path) or not str(raw).strip():
            raise ValueError("must be a path")
        try:
            return Path(raw).expanduser()
        except RuntimeError:
            raise ValueError("names a home folder that is not known; write the path out") from None

    return Kind(metavar, parse)


def _refuse() -> Any:
    raise ValueError

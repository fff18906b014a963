"""Numbers for display: three digits and a unit, in columns of fixed width."""

from collections.abc import Callable
from typing import Final

from infinistore.monitor.rates import Quantile

UNKNOWN: Final = "-"
"""Shown for unknown values."""

_SIZE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_COUNT_UNITS: Final = ("k", "M", "G", "T", "P", "E")


def _three_digits(number: float) -> str:
    """At least three digits of a number below 1024, without a trailing point."""
    return f"{number:.2f}" if number < 9.995 else f"{number:.1f}" if number < 99.95 else f"{number:.0f}"


def size(size_bytes: float | None) -> str:
    """Bytes, in at most 8 characters: `1.23 GiB`, `17 B`."""
    if size_bytes is None:
        return UNKNOWN
    number, unit = float(size_bytes), 0
    while number >= 1023.5 and unit < len(_SIZE_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return f"{number:.0f} B" if unit == 0 else f"{_three_digits(number)} {_SIZE_UNITS[unit]}"


def size_rate(bytes_per_s: float | None) -> str:
    """Bytes per second, in at most 10 characters: `1.23 GiB/s`."""
    return UNKNOWN if bytes_per_s is None else f"{size(bytes_per_s)}/s"


def count(number: float | None) -> str:
    """A count, in at most 7 characters: `12,345`, `1.23 M`."""
    if number is None:
        return UNKNOWN
    if number < 99_999.5:
        return f"{number:,.0f}"
    scaled, unit = number / 1000, 0
    while scaled >= 999.5 and unit < len(_COUNT_UNITS) - 1:
        scaled, unit = scaled / 1000, unit + 1
    return f"{_three_digits(scaled)} {_COUNT_UNITS[unit]}"


def rate(per_s: float | None) -> str:
    """A frequency per second, in at most 7 characters: `0.5`, `12,345`."""
    if per_s is None:
        return UNKNOWN
    return f"{per_s:.1f}" if 0 < per_s < 9.95 else count(per_s)


def percent(ratio: float | None) -> str:
    """A fraction, in at most 6 characters: `93.2 %`. `0 %` and `100 %` are exact."""
    if ratio is None:
        return UNKNOWN
    if ratio <= 0 or ratio >= 1:
        return f"{100 * ratio:.0f} %"
    return f"{min(max(100 * ratio, 0.1), 99.9):.1f} %"


def percent_of(part: float | None, whole: float | None) -> str:
    """A part of a whole, as `percent` has it."""
    return percent(part / whole if part is not None and whole else None)


def unless_zero(shown: Callable[[float], str], number: float | None) -> str:
    """A number as it is shown otherwise; nothing for 0 and for an unknown one."""
    return shown(number) if number else ""


def duration(seconds: float) -> str:
    """A time span in its two largest units: `42 s`, `5 min 12 s`, `2 d 3 h`."""
    if 0 < seconds < 9.95 and seconds != int(seconds):
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def latency(found: Quantile | None) -> str:
    """A latency, in at most 7 characters: `87 us`, `1.2 ms`, `<20 us`, `>10 s`."""
    if found is None:
        return UNKNOWN
    value = found.value_s
    for unit_s, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= 0.9995 * unit_s:
            number = value / unit_s
            digits = 0 if found.bound or number >= 9.95 else 1
            return f"{found.bound}{number:.{digits}f} {name}"
    return f"{found.bound}{value * 1e6:.0f} us"

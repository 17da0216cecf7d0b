"""Text for people: safe text from captures, and numbers with units, the same in every output.

The sender in a capture chooses every character of client ids, topics and record values. `visible`
is the only sanitizer: each output passes such text through it, then escapes for its own format.
"""

from __future__ import annotations

import datetime as dt
import difflib
import shlex
import unicodedata
from collections.abc import Sequence

NONE = "–"
_SHORT = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


def visible(value: str | None, limit: int | None = None) -> str:
    r"""Return the text with each unprintable character escaped, cut to `limit` characters.

    Control characters, line ends, marks of writing direction and lone surrogates become ``\\n``,
    ``\\x1b`` or ``\\u202e``. A cut text ends with its full length. None becomes an empty text.
    """
    if value is None:
        return ""
    cut = value[:limit]
    shown = cut if cut.isprintable() else "".join(map(_escaped, cut))
    return shown if len(cut) == len(value) else f"{shown}… ({len(value):,} characters)"


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x100:
        return _SHORT.get(character) or f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shell_word(word: str) -> str:
    """Return a word quoted for a shell; SQL with quotes of its own stays readable."""
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)


def no_such(what: str, name: str, names: Sequence[str]) -> str:
    """Return that no thing of a kind has this name, with the names that look like it, or all.

    Case and folders do not count: "fetch" and "apis/Fecth" both look like ``apis/Fetch``.
    """
    last = {each: each.rpartition("/")[2].lower() for each in names}
    near = difflib.get_close_matches(name.rpartition("/")[2].lower(), set(last.values()), 3, 0.7)
    alike = " or ".join(each for one in near for each in last if last[each] == one)
    hint = f"did you mean {alike}?" if alike else f"there are {', '.join(names)}"
    return f"no {what} {name!r}; {hint}"


def display_width(text: str) -> int:
    """Return the columns of a text on a terminal: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def shortened(text: str, width: int) -> str:
    """Cut the text to at most so many columns; a cut text ends with "…"."""
    if display_width(text) <= width:
        return text
    room = width - 1
    for number, character in enumerate(text):
        room -= _columns(character)
        if room < 0:
            return text[:number] + "…" if width > 0 else ""
    return text


def count(value: float | None) -> str:
    """Format a count: 12,345"""
    return NONE if value is None else f"{value:,.0f}"


def decimal(value: float | None) -> str:
    """Format with three significant digits: 1,234 / 12.3 / 1.23 / 0.012"""
    if value is None:
        return NONE
    size = abs(value)
    if size >= 100 or value == 0:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 0.1:
        return f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.0005 else f"{value:.1e}"


def byte_size(value: float | None) -> str:
    """Format bytes in decimal units: 1.2 MB"""
    if value is None:
        return NONE
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:,.0f} B" if unit == "B" else f"{decimal(value)} {unit}"
        value /= 1000
    return f"{decimal(value)} TB"


def duration(ms: float | None) -> str:
    """Format milliseconds: 0.42 ms, 12.3 ms, 1.23 s, 4 min 10 s, 2 h 5 min"""
    if ms is None:
        return NONE
    if abs(ms) < 1000:
        return f"{decimal(ms)} ms"
    seconds = ms / 1000
    if seconds < 120:
        return f"{decimal(seconds)} s"
    if seconds < 7200:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds < 48 * 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    return f"{int(seconds // 86400)} d {int(seconds % 86400 // 3600)} h"


def width(ms: float) -> str:
    """Format a round duration: 50 ms, 2 s, 15 min"""
    for unit, size in (("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if ms >= size and ms % size == 0:
            return f"{ms / size:g} {unit}"
    return f"{ms:g} ms"


def share(value: float | None) -> str:
    """Format a share: 12 %, 0.3 %, below 0.01 %"""
    if value is None:
        return NONE
    percent = value * 100
    if percent == 0 or percent == 100:
        return f"{percent:.0f} %"
    if percent < 0.01:
        return "below 0.01 %"
    if 99.9 < percent < 100:
        return "above 99.9 %"
    return f"{decimal(percent)} %"


def ratio(value: float | None) -> str:
    """Format a ratio: 3.42×"""
    return NONE if value is None else f"{value:.2f}×"


def rate(value: float | None) -> str:
    """Format a count per second: 1.2/s"""
    return NONE if value is None else f"{decimal(value)}/s"


def rfc3339(value: dt.datetime, timespec: str = "auto") -> str:
    """Format a time: 2026-11-21T14:03:07.123456Z, with its zone if that is not UTC"""
    return value.isoformat(timespec=timespec).replace("+00:00", "Z")


def moment(value: str | None) -> str:
    """Return the time of an RFC 3339 text, without its date: 14:03:07.123456 (UTC)"""
    return NONE if value is None else value.partition("T")[2].rstrip("Z")


def dated(value: str | None) -> str:
    """Return the date and time of an RFC 3339 text, without the year: 11-21 14:03:07.123456"""
    return NONE if value is None else value[5:].replace("T", " ").rstrip("Z")


def day(value: str | None) -> str:
    """Return the date and second of an RFC 3339 text: 2026-11-21 14:03:07 UTC"""
    if value is None:
        return NONE
    parsed = dt.datetime.fromisoformat(value)
    return parsed.strftime("%Y-%m-%d %H:%M:%S UTC")


def plural(number: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun: 1 rebalance, 2 rebalances"""
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def unread(protocols: dict[str, int]) -> str | None:
    """Return a line about connections not read, given their numbers by protocol; None if all
    were read."""
    tls = protocols.get("tls", 0)
    others = {
        name: number
        for name, number in protocols.items()
        if number and name not in ("kafka", "tls", "none")
    }
    parts = []
    if tls:
        parts.append(
            f"{plural(tls, 'TLS connection')} not decrypted: any Kafka requests in them are "
            "missing here (--keylog FILE decrypts them)"
        )
    if others:
        named = ", ".join(f"{count(number)} {name}" for name, number in sorted(others.items()))
        number = sum(others.values())
        parts.append(f"{plural(number, 'connection')} without known Kafka traffic ({named})")
    return f"not read: {'; '.join(parts)}" if parts else None


def client(row: dict[str, object]) -> str:
    """Return a client's name with its address."""
    return f"{row.get('client_id') or '(none)'} @ {row.get('client_ip')}"

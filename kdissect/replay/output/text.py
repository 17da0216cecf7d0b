"""Values of differences as text for people, short and without secrets; and the templates of the
outputs: HTML, XML, and the texts of the console.

Every value in a template passes the sanitizer of its output, and Jinja escapes it in HTML and XML.
Lists on the console end after some lines; files have all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kdissect.codec.redaction import TEXT, is_secret
from kdissect.protocol.error_codes import error_name
from kdissect.replay.comparison.logs import RECORDS
from kdissect.replay.comparison.normal_form import SURPLUS, plain
from kdissect.replay.model import ABSENT, Difference, Outcome, Verdict
from kdissect.text import duration, plural

_TEXT_MAX, _BYTES_MAX = 200, 100  # characters of a value
_SHOWN_VALUES = 5
_SHOWN_MAX = 40  # lines of one list on the terminal


def value_text(value: Any) -> str:
    """A value as text, short."""
    value = plain(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return _short(value.hex(), _BYTES_MAX, plural(len(value), "byte"))
    if isinstance(value, list):
        text = "[" + ", ".join(map(value_text, value)) + "]"
        return _short(text, _TEXT_MAX, plural(len(value), "element"))
    text = _element(value) if isinstance(value, dict) else str(value)
    return _short(text, _TEXT_MAX, plural(len(text), "character"))


def _short(text: str, size_max: int, size: str) -> str:
    """A text, or its beginning with a checksum of the whole, by which `--baseline` tells two values
    apart."""
    if len(text) <= size_max:
        return text
    checksum = crc32(text.encode(errors="backslashreplace"))
    return f"{text[:size_max]}... ({size}, checksum {checksum:08x})"


def _element(element: Mapping[Any, Any]) -> str:
    """The fields of a struct, or unknown tags by number, of which nobody knows what they hold."""
    fields = []
    for name, value in element.items():
        is_tag = not isinstance(name, str)
        is_hidden = plain(value) is not None and (is_tag or is_secret(name, element))
        fields.append(f"{name}={TEXT if is_hidden else value_text(value)}")
    return "{" + ", ".join(fields) + "}"


def texts_of(one: Difference) -> tuple[str, str]:
    """The captured and the answered value."""
    return _text_of(one, one.captured), _text_of(one, one.answered)


def _text_of(one: Difference, value: Any) -> str:
    if one.is_secret and value is not None and value is not ABSENT:
        return TEXT
    if one.place == SURPLUS:  # nobody knows what these bytes are
        return plural(len(value or b""), "byte")
    return _record_text(value) if one.place.startswith(RECORDS) else value_text(value)


def _record_text(value: Any) -> str:
    if isinstance(value, bytes):
        return _short(repr(value)[1:], _BYTES_MAX, plural(len(value), "byte"))
    if isinstance(value, list):
        pairs = (f"{one['key']}={_record_text(one['value'])}" for one in value)
        return "[" + ", ".join(pairs) + "]"
    return value_text(value)


def readable_texts_of(one: Difference) -> tuple[str, str]:
    """The same, with the names of error codes."""
    return _code_names(one) or texts_of(one)


def note_of(one: Difference) -> str:
    """The note of a difference, with the names of its error codes in front."""
    names = _code_names(one)
    words = [f"{names[0]} then, {names[1]} now"] if names else []
    return "; ".join([*words, one.note] if one.note else words)


def _code_names(one: Difference) -> tuple[str, str] | None:
    """The names of two error codes; None for other values."""
    values = one.captured, one.answered
    is_code = one.place.endswith("error_code") and all(isinstance(each, int) for each in values)
    return (error_name(one.captured), error_name(one.answered)) if is_code else None


def time_text(us: float | None) -> str:
    """A time in microseconds for people."""
    return duration(None if us is None else us / 1000)


def timestamp(time_ns: int) -> str | None:
    """RFC 3339 with microseconds; None for an unknown time."""
    return None if time_ns < 0 else f"{np.datetime64(time_ns // 1000, 'us')}Z"


# -- findings -------------------------------------------------------------------------------------


def followers_text(followers: Sequence[Mapping[str, Any]]) -> str:
    """The exchanges that follow from one kind of differences, with their errors and fields."""
    listed = ", ".join(f"{each['exchanges']} {each['api_name']} {each['what']}"
                       for each in followers)  # fmt: skip
    count = plural(sum(each["exchanges"] for each in followers), "exchange")
    return f"then {count} on the same topic, partition, group or transaction: {listed}"


def finding_text(finding: Difference) -> str:
    """A finding about the whole run in one line."""
    expected, found = texts_of(finding)
    note = f" ({finding.note})" if finding.note else ""
    return f"{finding.place} of {finding.keys[0]}: {expected} -> {found}{note}"


def release_lines(changes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Rows as lines: ``DescribeConfigs ...: 1 -> 2: another default (KIP-1030), 4 places``. If a
    change is about several configs, the place has the first one, and all are named at the end."""
    lines = []
    for row in changes:
        values = f": {row['captured']} -> {row['answered']}"
        where = "" if row["path"].startswith("api_keys") else f" {row['path']}{values}"
        count, configs = plural(row["count"], "place"), row["configs"]
        names = f": {', '.join(configs)}" if len(configs) > 1 else ""
        lines.append(f"{row['api_name']}{where}: {row['what']}, {count}{names}")
    return lines


def dropped_notes(outcomes: Iterable[Outcome]) -> list[str]:
    """A line for each field that requests of one version lack in another, with the values."""
    values_of: dict[tuple[str, int, int, str], Counter[str]] = {}
    for outcome in outcomes:
        versions = outcome.step.exchange.api_version, outcome.api_version
        for each in outcome.dropped:
            key = outcome.step.api_name, *versions, each.place
            values_of.setdefault(key, Counter())[texts_of(each)[0]] += 1
    notes = []
    for (name, was, sent, path), texts in values_of.items():
        said = ", ".join(f"{count} x {text}" for text, count in texts.most_common(_SHOWN_VALUES))
        more = f" and {len(texts) - _SHOWN_VALUES} other values" * (len(texts) > _SHOWN_VALUES)
        notes.append(
            f"{name} v{was} was sent as v{sent}, which has no {path}; left out: {said}{more}"
        )
    return notes


def retry_notes(outcomes: Iterable[Outcome]) -> list[str]:
    """A line for each reason why requests of an API were sent again."""
    counts: Counter[tuple[str, str]] = Counter()
    for outcome in outcomes:
        for reason in {each.reason for each in outcome.earlier}:
            counts[outcome.step.api_name, reason] += 1
    return [
        f"{plural(count, name + ' request')} sent again: {reason}"
        for (name, reason), count in counts.most_common()
    ]


# -- templates ------------------------------------------------------------------------------------


def rendered(template: str, safe: Callable[[str], str], **values: Any) -> str:
    """A template with these values. safe: makes a text fit for the output; markup is kept."""
    environment = Environment(
        loader=PackageLoader("kdissect.replay.output"),
        autoescape="txt" not in template,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else safe(str(value)),
    )
    environment.filters |= {
        "finding": finding_text,
        "first_lines": _first_lines,
        "followers": followers_text,
        "plural": plural,
        "release_lines": release_lines,
        "time": time_text,
        "timestamp": timestamp,
    }
    verdicts = [verdict.value for verdict in Verdict]
    environment.globals |= {"verdicts": verdicts, "shown_max": _SHOWN_MAX}
    return environment.get_template(template).render(**values)


def _first_lines(lines: Iterable[str], more: str) -> list[str]:
    """The first lines of a list, and how many there are besides. more: with {} for the number."""
    every = list(lines)
    count = len(every) - _SHOWN_MAX
    return [*every[:_SHOWN_MAX], more.format(count)] if count > 0 else every

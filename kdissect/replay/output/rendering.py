"""The templates of the outputs: HTML, XML, and the texts of the console.

Every value passes the sanitizer of its output, and Jinja escapes it in HTML and XML. Lists on the
console end after some lines; files have all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kdissect.replay.model import Verdict
from kdissect.replay.output import text
from kdissect.replay.output.rows import timestamp
from kdissect.text import plural

_SHOWN_MAX = 40  # lines of one list on the terminal


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
        "finding": text.finding_text,
        "first_lines": _first_lines,
        "followers": text.followers_text,
        "plural": plural,
        "release_lines": text.release_lines,
        "time": text.time_text,
        "timestamp": timestamp,
    }
    verdicts = [verdict.value for verdict in Verdict]
    environment.globals |= {"verdicts": verdicts, "shown_max": _SHOWN_MAX}
    return environment.get_template(template).render(**values)


def _first_lines(lines: Iterable[str], more: str) -> list[str]:
    """The first lines of a list, and how many there are besides. more: with {} for the number."""
    rest = iter(lines)
    shown = list(islice(rest, _SHOWN_MAX))
    count = sum(1 for _ in rest)
    return [*shown, more.format(count)] if count else shown

"""The document of a report as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from importlib.metadata import version
from typing import Any

import jinja2
from markupsafe import Markup, escape

from kdissect import kernel_cache, text
from kdissect.atomic_file import atomic_write
from kdissect.charts import VEGA_LITE, Chart, mark_incidents
from kdissect.incidents import KINDS
from kdissect.report.document import Block, Document, Listing, Section, Story
from kdissect.report.sections import overview
from kdissect.report.table_view import View, view
from kdissect.text import visible

LEVEL_NAMES = {"bad": "Look at this", "warn": "Worth a look", "info": "Good to know"}


@cache
def _environment() -> jinja2.Environment:
    """Jinja's environment, which keeps the compiled templates for further reports."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters["visible"] = lambda value: visible(value, 1000)
    environment.globals["text"] = text
    environment.filters["paragraph"] = _paragraph
    return environment


def render(document: Document, sections: Sequence[Section], csv_names: dict[str, str]) -> str:
    """The page. csv_names: table -> file."""
    environment = _environment()
    blocks = list(_flat(block for section in sections for block in section.blocks))
    listings = [block for block in blocks if isinstance(block, Listing)]
    listings += [block.listing for block in blocks if isinstance(block, Story)]
    timeline = overview.timeline(document)
    charts = [block for block in (timeline, *blocks) if isinstance(block, Chart)]
    mark_incidents(charts[1 if timeline else 0 :], document["incidents"])
    views = _views(document, listings, csv_names)
    library, page_script = vega_script(), _asset("page.js")
    return environment.get_template("report.html.j2").render(
        d=document,
        name=visible(document["source"], 300),
        sections=sections,
        timeline=timeline,
        kinds=KINDS,
        level_names=LEVEL_NAMES,
        views=views,
        type_of=lambda block: type(block).__name__,
        style=Markup(_asset("style.css")),
        plain_style=Markup(environment.get_template("plain.css").render(views=views)),
        script_hashes=Markup(" ".join(_hash(script) for script in (library, page_script))),
        charts={chart.id: chart.to_json() for chart in charts},
        vega_script=Markup(_inline(library)),
        page_script=Markup(_inline(page_script)),
    )


def _flat(blocks: Any) -> Iterator[Block]:
    """Yield the blocks of a section, charts beside each other one by one."""
    for block in blocks:
        if isinstance(block, tuple | list):
            yield from _flat(block)
        elif block is not None:
            yield block


def _paragraph(text: str) -> Markup:
    """Text of ours and of the capture; what stands in backticks is code."""
    pieces = [escape(piece) for piece in text.split("`")]
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if number % 2 else piece
        for number, piece in enumerate(pieces)
    )


def _views(
    document: Document, listings: Sequence[Listing], csv_names: dict[str, str]
) -> dict[str, View | None]:
    d = document["overview"]
    captures = {row["capture_id"]: row["path"] for row in d["captures"]}
    first, last = d["first_time"], d["last_time"]
    dated = first is not None and first[:10] != last[:10]
    return {
        listing.id: view(listing, captures, csv_names.get(listing.table.csv), dated=dated)
        for listing in listings
    }


def _asset(name: str) -> str:
    return resources.files("kdissect.report").joinpath("templates", name).read_text("utf-8")


def _inline(script: str) -> str:
    """A script of ours or of a library; its bytes are hashed, so it must be good as it is."""
    lowered = script.lower()
    if "</script" in lowered or "<!--" in lowered:
        raise AssertionError("a script would end its own element")
    return script


def vega_script() -> str:
    """Vega, Vega-Lite and their embedder as one script that sets `window.vegaEmbed`.

    Bundling takes seconds, so the script is kept beside the compiled kernels.
    """
    import vl_convert

    folder = kernel_cache.folder()
    file = folder and folder / f"vega-embed-{VEGA_LITE}-{version('vl-convert-python')}.js"
    if file is not None:
        with suppress(OSError, UnicodeDecodeError):
            return file.read_text("utf-8")
    script: str = vl_convert.javascript_bundle(
        "window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE
    )
    # of an editor, of a tracker in an error message, of a schema: none is used, none stays
    script = re.sub(r"https://(github\.com|vega\.github\.io)", "about:blank#", script)
    if file is not None:
        with (
            suppress(OSError),
            atomic_write(file) as part,
            open(part, "w", encoding="utf-8") as out,
        ):
            out.write(script)
    return script


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"

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

from kdissect import kernel_cache
from kdissect import text as f
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
    environment.filters["moment"] = f.moment
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
        subtitle=_subtitle(document),
        sections=sections,
        tiles=_tiles(document),
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


def _subtitle(d: Document) -> str:
    o = d["overview"]
    if o["first_time"] is None:
        return "An empty capture."
    return (
        f"{f.day(o['first_time'])}, {f.duration(o['span_s'] * 1000)} · "
        f"{f.plural(len(o['captures']), 'capture file')}, {f.count(o['packets'])} packets, "
        f"{f.byte_size(o['capture_bytes'])}"
    )


def _tiles(d: Document) -> list[dict[str, str]]:
    """The main figures: label, value, note, tooltip and level of each."""
    o, everyone, read = d["overview"], d["latency"]["all"], d["overview"]["read"]
    span = o["span_s"] or 0
    unread, missing = read["unread_tls_connections"], o["health"]["missing_byte_count"]
    lost = [f"{f.byte_size(missing)} missing"] if missing else []
    if unread:
        lost.append(f"{f.plural(unread, 'TLS connection')} not decrypted")
    outdated, behind = d["readiness"]["outdated_count"], d["lag"] and d["lag"]["groups"]["rows"]
    rows = [
        (
            "Exchanges",
            f.count(o["exchanges"]),
            f.rate(o["exchanges"] / span) if span else "",
            "requests with their responses, or either alone",
        ),
        (
            "Service time p50",
            f.duration(everyone["p50"]),
            f"p95 {f.duration(everyone['p95'])}, p99 {f.duration(everyone['p99'])}",
            "service_ms of answers: what the broker took, without long polls and waits for a group",
        ),
        (
            "Errors",
            f.count(o["failed"]),
            f.share(o["failed"] / o["paired"]) + " of answers" if o["paired"] else "",
            "answers with an error code anywhere that is no routine step of the protocol",
        ),
        (
            "Clients",
            f.count(d["clients"]["total"]),
            f.plural(o["kafka_connections"], "Kafka connection"),
            "client ids, each at each of its addresses",
        ),
        (
            f"Break on Kafka {d['readiness']['target']}",
            f.plural(outdated, "client"),
            "",
            "clients that need what that release no longer takes, see Readiness",
            "warn" if outdated else "",
        ),
        (
            "Topics",
            f.count(d["topics"]["topics"]["total"]),
            f"{f.count(o['records'])} records seen",
            "topics that were written, read or asked for, Kafka's own too",
        ),
        (
            "Lag at the end",
            f.count(behind[0]["lag_at_end"]) if behind else f.NONE,
            visible(behind[0]["group_id"], 60) if behind else "",
            "records that the group with most lag is behind, see Lag",
        ),
        (
            "Payload",
            f.byte_size(read["request_bytes"] + read["response_bytes"]),
            f"{f.byte_size(read['request_bytes'])} to brokers",
            "TCP payload of Kafka connections, each byte once",
        ),
        (
            "Read",
            f.share(read["framed_byte_count"] / read["byte_count"] if read["byte_count"] else None),
            ", ".join(lost),
            "bytes in Kafka's frames, of all bytes of Kafka connections and of TLS connections "
            "that were not decrypted, the missing ones included",
            "warn" if lost else "",
        ),
        ("Anomalies", f.count(o["anomalies"]), "", "faults in the data, each with its place"),
    ]
    names = ("label", "value", "note", "help", "level")
    return [dict(zip(names, (*row, ""), strict=False)) for row in rows]

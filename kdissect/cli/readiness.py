"""`kdissect readiness`: shows which clients another Kafka release would break."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Literal

from kdissect.cli.inventory import InventoryOptions, write_inventory
from kdissect.cli.options import ResultOptions, SourceOptions
from kdissect.cli.output import say, say_notes, shown, some_of
from kdissect.cli.sources import open_source
from kdissect.cli.verbs import verb
from kdissect.step_log import logged_step

if TYPE_CHECKING:
    from kdissect.tables.schemas import Row


@verb("""
  kdissect readiness tables/ --target 4.0
  kdissect readiness 'trace-*.pcap' --target 4.0
  kdissect readiness tables/ --target 4.0 --fail-on unknown
  kdissect readiness tables/ --target 4.0 --json > readiness.json
  kdissect readiness before/ after/ --target 3.9 --inventory clients.csv
""")
def readiness_command(
    source: list[str],
    target: str,
    capture: SourceOptions,
    inventory: InventoryOptions,
    result: ResultOptions,
    fail_on: Literal["breaks", "unknown"] = "breaks",
) -> None:
    """Show which clients would break on a Kafka release, and what they use that it lacks.

    Exit code 1 if any client would break; see --fail-on.
    """
    from kdissect.readiness.assessment import BREAKS

    inventory.check()
    tables = open_source(source, capture)
    if not result.quiet:
        say_notes(tables)
    with logged_step("assess clients") as counts:
        document = tables.readiness(target)
        counts["clients"] = len(document["clients"])
    if not document["clients"] and not result.quiet:
        say(f"warning: no Kafka client in {some_of(source)}")
    changes: list[str] = []
    if inventory.is_given:
        changes = ["", *write_inventory(tables, inventory)]
    failed = document["verdict"] in {BREAKS, fail_on}
    result.put(document, chain(_lines(document), changes), failed=failed)


def _lines(document: Row) -> Iterator[str]:
    from kdissect.text import plural

    counts = document["counts"]
    exact = "" if document["target"] == document["release"] else f" (as of {document['release']})"
    yield (
        f"Kafka {document['target']}{exact}: {plural(counts['breaks'], 'client')} would break, "
        f"{counts['unknown']} unknown, {counts['ok']} ok"
    )
    yield _established(document)
    if not document["counts"]["breaks"] + document["counts"]["unknown"]:
        yield ""
    before = ""
    for client in document["clients"]:
        if client["verdict"] != "ok" or before not in ("", "ok"):
            yield ""
        before = client["verdict"]
        yield from _client_lines(client, document["target"])
    internal = document["internal"]
    if internal:
        connections = sum(row["connection_count"] for row in internal)
        names = ", ".join(_text(row["client_id"]) for row in internal)
        yield ""
        yield (
            f"Not counted: {plural(connections, 'connection')} of brokers and controllers "
            f"(client IDs {names})"
        )
    unseen = document["unseen"]
    if unseen["tls_connection_count"]:
        yield ""
        yield (
            f"Not seen: {unseen['tls_connection_count']:,} TLS connections of "
            f"{some_of([*map(_text, unseen['tls_addresses'])])}; --keylog of dissect decrypts them"
        )


def _established(document: Row) -> str:
    """Return how much of the traffic the verdicts rest on."""
    from kdissect.text import plural

    counts, unseen = document["counts"], document["unseen"]
    seen = counts["breaks"] + counts["ok"]
    left_out = []
    if count := unseen["tls_connection_count"]:
        left_out.append(plural(count, "TLS connection"))
    if count := unseen["undetermined_exchange_count"]:
        left_out.append(
            plural(count, "request of uncertain version", "requests of uncertain version")
        )
    without = f"; without {' and '.join(left_out)}" if left_out else ""
    return (
        f"Established for {seen:,} of {plural(sum(counts.values()), 'client')}, "
        f"{document['established_request_count']:,} of {document['request_count']:,} requests"
        f"{without}"
    )


def _client_lines(client: Row, target: str) -> Iterator[str]:
    from kdissect.text import plural

    software = " ".join(
        _text(client[name])
        for name in ("software_name", "software_version")
        if client[name] is not None
    )
    parts = [client["address"], _text(client["client_id"]), software]
    if client["principal"] is not None:
        parts.append(f"as {_text(client['principal'])}")
    yield f"{client['verdict']:<8} {'  '.join(part for part in parts if part)}"
    for finding in client["findings"]:
        taken = finding["taken"]
        takes = "does not have it" if taken is None else f"takes {_span(taken)}"
        yield (
            f"         {finding['api_name']} {finding['api_version']}, "
            f"{plural(finding['request_count'], 'time')}: {target} {takes}; {finding['why']}"
        )
    unproven = [row for row in client["never_seen"] if row["verdict"] != "ok"]
    for why, missing in groupby(unproven, key=lambda row: row["why"]):
        names = ", ".join(f"{row['api_name']} {_span(row['taken'])}" for row in missing)
        yield f"         never seen: {names}; {why}"
    for written in client["formats"]:
        if not written["is_taken"]:
            yield (
                f"         writes message format {written['magic']}: "
                f"{written['batch_count']:,} batches, {written['record_count'] or 0:,} records"
            )
    if client["upgrade"]:
        yield f"         -> {client['upgrade']}"


def _span(versions: list[int]) -> str:
    return f"{versions[0]} to {versions[1]}"


_text = partial(shown, missing="(no client id)")

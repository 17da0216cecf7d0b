"""`kdissect diff`: compares two captures or table sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from kdissect.cli.options import ResultOptions, SourceOptions
from kdissect.cli.output import shown
from kdissect.cli.sources import open_source
from kdissect.cli.verbs import verb
from kdissect.step_log import logged_step

if TYPE_CHECKING:
    from kdissect.tables.schemas import Row


@verb("""
  kdissect diff before/ after/
  kdissect diff before.pcap after.pcap
  kdissect diff before/ after/ --fail-on errors,latency
  kdissect diff before/ after/ --json > changes.json
""")
def diff_command(
    a: str,
    b: str,
    capture: SourceOptions,
    result: ResultOptions,
    fail_on: str | None = None,
    memory_limit: str = "1GiB",
) -> None:
    """Compare two captures: versions, clients, errors, latency, sizes and settings."""
    from kdissect.diff.compare import compare, failing, parse_kinds

    kinds = parse_kinds(fail_on)
    tables = open_source([a], capture), open_source([b], capture)
    with logged_step("compare"):
        document = compare(*tables, memory_limit=memory_limit)
    failed = failing(document, kinds)
    ending = ["", f"Failed on {', '.join(failed)}"] if failed else []
    result.put(
        {**document, "fail_on": kinds, "failed_on": failed},
        chain(_lines(document, a, b), ending),
        failed=bool(failed),
    )


def _lines(document: Row, a: str, b: str) -> Iterator[str]:
    from kdissect.diff.compare import OPEN

    for name, path in (("a", a), ("b", b)):
        totals = document[name]
        seconds = totals["duration_s"]
        lasting = "" if seconds is None else f" in {seconds:,.1f} s"
        yield (
            f"{name}  {path}: {totals['exchange_count']:,} exchanges{lasting}, "
            f"{totals['connection_count']:,} connections, {totals['client_count']:,} clients"
        )
        if totals["missing_byte_count"]:
            yield f"   {totals['missing_byte_count']:,} bytes are missing in it: counts are too low"
        if totals["unjudged_count"]:
            yield (
                f"   {totals['unjudged_count']:,} requests without an answer could not be judged: "
                "it may be among missing bytes, or after the end"
            )
    same: list[str] = []
    unknown: list[str] = []
    for kind, changes in document["changes"].items():
        if not changes:
            tests = document["compared"].get(kind)
            is_compared = not tests or any(row["too_few"] is None for row in tests)
            (same if is_compared else unknown).append(kind)
            continue
        yield ""
        counts = Counter(row["change"] if row["change"] in OPEN else "changed" for row in changes)
        words = [f"{counts[word]:,} {word}" for word in ("changed", *OPEN) if counts[word]]
        yield f"{kind}: {', '.join(words)}"
        if kind in _DISTRIBUTIONS:
            yield from _distributions(changes, kind)
        else:
            yield from _SHOW[kind](changes)
    if same:
        yield ""
        yield f"No change found in {', '.join(same)}"
    if unknown:
        yield f"Too little traffic to compare {', '.join(unknown)}"
    few = sum(row["too_few"] == "exchanges" for row in document["compared"]["latency"])
    if few:
        yield f"Too few exchanges to compare the latency of {few:,} APIs"


_text = partial(shown, missing="(none)")
_SIGN = {"added": "+", "removed": "-", "changed": "~"}


def _apis(changes: list[Row]) -> Iterator[str]:
    from kdissect.text import plural

    yield from _aligned(
        (f"  {_SIGN[row['change']]} {row['api_name']}", plural(_either(row), "exchange"))
        for row in changes
    )


def _either(row: Row) -> int:
    return int(row["count_a"] or row["count_b"])


def _versions(changes: list[Row]) -> Iterator[str]:
    by_api: dict[str, dict[str, list[str]]] = {}
    for row in changes:
        lists = by_api.setdefault(row["api_name"], {"removed": [], "added": []})
        lists[row["change"]].append(f"{row['api_version']} ({_either(row):,})")
    yield from _aligned(
        (
            f"  ~ {api}",
            "  ".join(
                f"{_SIGN[change]} {', '.join(listed)}" for change, listed in lists.items() if listed
            ),
        )
        for api, lists in by_api.items()
    )


def _clients(changes: list[Row]) -> Iterator[str]:
    rows = []
    for row in changes:
        side = "a" if row["change"] == "removed" else "b"
        names = ("software", "principals", "addresses")
        if row["change"] == "changed":
            words = [
                f"{name} {_list(row[f'{name}_a'])} -> {_list(row[f'{name}_b'])}"
                for name in row["fields"]
            ]
        else:
            words = [_list(row[f"{name}_{side}"]) for name in names if row[f"{name}_{side}"]]
        rows.append((f"  {_SIGN[row['change']]} {_text(row['client_id'])}", "  ".join(words)))
    yield from _aligned(rows)


def _list(values: list[str]) -> str:
    return ", ".join(map(_text, values)) or "none"


def _errors(changes: list[Row]) -> Iterator[str]:
    yield from _aligned(
        (
            f"  {_mark(row)} {row['api_name']}",
            row["error_name"],
            row["change"],
            f"{row['count_a']:,} of {row['n_a']:,} -> {row['count_b']:,} of {row['n_b']:,}",
            _certainty(row),
        )
        for row in changes
    )


def _mark(row: Row) -> str:
    """Return ! for worse, ~ for changed, ? for undecided."""
    return "!" if row["is_worse"] else "~" if row["is_decided"] else "?"


def _certainty(row: Row) -> str:
    """Return the numbers of compared connections (or moments) and the p-value, or that there are
    too few of them."""
    unit = "moments" if row["too_few"] == "moments" else "connections"
    units = f"{row[f'{unit}_a']:,}, {row[f'{unit}_b']:,} {unit}"
    p_value = row["tail_p_value"] if "tail" in row["change"] else row["p_value"]
    if not row["is_decided"]:
        p_value = min(p_value, row.get("tail_p_value", p_value))
        if p_value == 1:
            return f"{units}: too few to exclude chance"
        return f"{units}, p {p_value:.3f}: may be chance"
    chance = "p < 0.001" if p_value < 0.001 else f"p {p_value:.3f}"
    return f"{units}, {chance}"


_WAITS = {"answer": "", "long_poll": " (long poll)", "group": " (waits for members)"}


def _batches_of(row: Row) -> str:
    if row["part"] == "batch":
        return f"batches of {_text(row['topic'])}"
    return f"{row['api']} {row['part']}"


# Kinds with two distributions -> the name of a row, and the unit of its values
_DISTRIBUTIONS: dict[str, tuple[Callable[[Row], str], str]] = {
    "latency": (lambda row: f"{row['api']}{_WAITS[row['wait']]}", "ms"),
    "transfers": (lambda row: f"{row['api']} {row['part']}", "ms"),
    "round_trips": (
        lambda row: f"{row['percentile']} of {_text(row['client_id'])}, {row['end_point']}'s side",
        "ms",
    ),
    "sizes": (_batches_of, "bytes"),
}


def _distributions(changes: list[Row], kind: str) -> Iterator[str]:
    name, unit = _DISTRIBUTIONS[kind]
    yield from _aligned(
        (
            f"  {_mark(row)} {name(row)}",
            row["change"],
            f"p50 {_number(row['p50_a'])} -> {_number(row['p50_b'])}",
            f"p95 {_number(row['p95_a'])} -> {_number(row['p95_b'])} {unit}",
            f"n {row['n_a']:,}, {row['n_b']:,}",
            _certainty(row),
        )
        for row in changes
    )


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _configs(changes: list[Row]) -> Iterator[str]:
    for row in changes:
        values = {
            "changed": f"{shown(row['value_a'], 'null')} -> {shown(row['value_b'], 'null')}",
            "added": shown(row["value_b"], "null"),
            "removed": shown(row["value_a"], "null"),
        }
        yield (
            f"  {_SIGN[row['change']]} {row['resource_type']} {_text(row['resource_name'])} "
            f"{_text(row['config'])}: {values[row['change']]}"
        )


_SHOW: dict[str, Callable[[list[Row]], Iterator[str]]] = {
    "apis": _apis,
    "versions": _versions,
    "clients": _clients,
    "errors": _errors,
    "configs": _configs,
}


def _aligned(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    listed = list(rows)
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    for row in listed:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()

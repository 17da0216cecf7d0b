"""What changed between two captures, kind by kind, as one document.

Every kind gives a list of changes, each with `change` and `is_worse`: an error that appeared, a
latency that grew. What is merely different is not worse. A latency or a size counts as changed
when the difference is beyond chance (Holm-corrected over the kind) and large enough to matter: see
`statistics` for the tests and the constants here for the limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdissect.api import Tables
from kdissect.diff.collect import PERCENTILES, SIDES, distributions, open_both, plain, prepare
from kdissect.diff.statistics import holm, rank_test, share_test
from kdissect.errors import Error
from kdissect.sql import Database

FORMAT_VERSION = 1
ALPHA = 0.01  # the chance of one false alarm among all tests of a kind
DELTA_MIN = 0.147  # Cliff's delta that Romano et al. (2006) call small
RATIO_MIN = 1.1  # medians that are closer than this are the same to people
SAMPLE_MIN = 20  # exchanges on each side: fewer are not compared
TAIL_SAMPLE_MIN = 100  # of these, one in twenty is in the tail
TAIL_RATIO_MIN = 2.0
ERROR_RATIO_MIN = 1.5
NO_ANSWER = "(no answer)"
RESOURCES = {2: "topic", 4: "broker", 8: "broker logger", 16: "client metrics", 32: "group"}

Change = dict[str, Any]


class UnknownKind(Error, ValueError):
    """`--fail-on` names a kind that there is not."""


def compare(a: Tables, b: Tables, *, memory_limit: str | None = None) -> dict[str, Any]:
    """What changed from a to b, as a document for JSON.

    ``a`` and ``b`` say how much was compared, ``changes`` has a list for each of `KINDS`,
    ``compared`` all distributions with their tests, changed or not.
    """
    with open_both(a, b, memory_limit) as database:
        prepare(database, a, b)
        changes: dict[str, list[Change]] = {}
        compared: dict[str, list[Change]] = {}
        for kind, find in _FINDERS.items():
            found = find(database)
            if kind in _MEASURED:
                compared[kind] = found
                found = [row for row in found if row["change"] is not None]
            changes[kind] = found
        sides = {side: _side(database, side) for side in SIDES}
    return {"format_version": FORMAT_VERSION, **sides, "changes": changes, "compared": compared}


def failing(document: dict[str, Any], kinds: Sequence[str]) -> list[str]:
    """Those of the kinds that have a change to fail on.

    For errors and latency, one for the worse; for the others, any.
    """
    return [
        kind
        for kind in kinds
        if any(row["is_worse"] or kind not in _WORSENING for row in document["changes"][kind])
    ]


def parse_kinds(text: str | None) -> list[str]:
    """``errors,latency`` as a list; raises UnknownKind."""
    kinds = [kind.strip() for kind in (text or "").split(",") if kind.strip()]
    for kind in kinds:
        if kind not in KINDS:
            raise UnknownKind(f"--fail-on {kind}: no such kind; there are {', '.join(KINDS)}")
    return kinds


def _side(database: Database, side: str) -> dict[str, Any]:
    (row,) = database.rows(
        f"""
        select count(*) exchange_count, count(distinct connection_id) connection_count,
            count(distinct (client_ip, client_id)) client_count,
            min(coalesce(request_time, response_time)) first_time,
            max(coalesce(response_end_time, request_end_time)) last_time
        from {side}_exchanges
        """
    )
    (missing,) = database.rows(
        f"""
        select coalesce(sum(request_missing_byte_count + response_missing_byte_count), 0)::bigint
            missing_byte_count
        from {side}_connections where is_kafka
        """
    )
    seconds = None
    if row["first_time"] is not None and row["last_time"] is not None:
        seconds = (row["last_time"] - row["first_time"]).total_seconds()
    for name in ("first_time", "last_time"):
        row[name] = None if row[name] is None else row[name].isoformat().replace("+00:00", "Z")
    return {**row, "duration_s": seconds, **missing}


# What is there or is not


def _apis(database: Database) -> list[Change]:
    rows = database.rows(
        """
        select api_name, count(*) filter (side = 'a') count_a, count(*) filter (side = 'b') count_b
        from x group by all having count_a = 0 or count_b = 0 order by api_name
        """
    )
    return [{**row, "change": _presence(row["count_a"]), "is_worse": False} for row in rows]


def _presence(in_a: Any) -> str:
    return "removed" if in_a else "added"


def _versions(database: Database) -> list[Change]:
    """Versions of APIs that both have."""
    rows = database.rows(
        """
        with counted as (
            select api_name, api_version, count(*) filter (side = 'a') count_a,
                count(*) filter (side = 'b') count_b
            from x where api_version is not null group by all
        )
        select *, sum(count_a) over (partition by api_name) > 0
            and sum(count_b) over (partition by api_name) > 0 as in_both
        from counted qualify in_both and (count_a = 0 or count_b = 0)
        order by api_name, api_version
        """
    )
    return [
        {
            "api_name": row["api_name"],
            "api_version": row["api_version"],
            "count_a": row["count_a"],
            "count_b": row["count_b"],
            "change": _presence(row["count_a"]),
            "is_worse": False,
        }
        for row in rows
    ]


_CLIENT_FIELDS = ("software", "principals", "addresses")


def _clients(database: Database) -> list[Change]:
    """Clients by id; one that both have may have changed software, principal or address."""
    parts = " union all ".join(
        f"""
        select '{side}' side, x.client_id, x.client_ip,
            concat_ws(' ', c.client_software_name, c.client_software_version) software, c.principal
        from x join {side}_connections c using (connection_id)
        where x.side = '{side}' and x.status <> 'request_missing'
        """
        for side in SIDES
    )
    lists = ", ".join(
        f"coalesce(list_sort(list(distinct {column}) filter (side = '{side}' and {column} <> '')), "
        f"[]) {name}_{side}"
        for name, column in (
            ("software", "software"),
            ("principals", "principal"),
            ("addresses", "client_ip"),
        )
        for side in SIDES
    )
    rows = database.rows(
        f"""
        select client_id, count(*) filter (side = 'a') count_a,
            count(*) filter (side = 'b') count_b, {lists}
        from ({parts}) group by client_id order by client_id nulls first
        """
    )
    changes = []
    for row in rows:
        changed = [name for name in _CLIENT_FIELDS if row[f"{name}_a"] != row[f"{name}_b"]]
        if row["count_a"] and row["count_b"]:
            if changed:
                changes.append({**row, "change": "changed", "fields": changed, "is_worse": False})
        else:
            changes.append(
                {**row, "change": _presence(row["count_a"]), "fields": [], "is_worse": False}
            )
    return changes


def _configs(database: Database) -> list[Change]:
    """Settings that were read or written; for new and gone ones of what both captures show."""
    rows = database.rows(
        """
        with known as (
            select resource_type, resource_name from configs group by all
            having count(distinct side) = 2
        ), paired as (
            select resource_type, resource_name, config,
                any_value(value) filter (side = 'a') value_a,
                any_value(value) filter (side = 'b') value_b,
                bool_or(is_null) filter (side = 'a') null_a,
                bool_or(is_null) filter (side = 'b') null_b,
                any_value(apis) filter (side = 'a') apis_a,
                any_value(apis) filter (side = 'b') apis_b
            from configs join known using (resource_type, resource_name) group by all
        )
        from paired where null_a is null or null_b is null or value_a <> value_b or null_a <> null_b
        order by resource_type, resource_name, config
        """
    )
    changes = []
    for row in rows:
        both = row["null_a"] is not None and row["null_b"] is not None
        if not both and row["apis_a"] != row["apis_b"] and not _comparable(database, row):
            continue
        changes.append(
            {
                "resource_type": RESOURCES.get(row["resource_type"], str(row["resource_type"])),
                "resource_name": row["resource_name"],
                "config": row["config"],
                "value_a": None if row["null_a"] else row["value_a"],
                "value_b": None if row["null_b"] else row["value_b"],
                "change": "changed" if both else _presence(row["null_a"] is not None),
                "is_worse": False,
            }
        )
    return changes


def _comparable(database: Database, row: dict[str, Any]) -> bool:
    """Whether the side that lacks a setting was asked in the same way at all."""
    side = "b" if row["apis_b"] is None else "a"
    apis = row["apis_a"] or row["apis_b"]
    listed = ", ".join(f"'{api}'" for api in apis)
    name = row["resource_name"].replace("'", "''")
    (found,) = database.rows(
        f"""
        select count(*) n from configs where side = '{side}'
            and resource_type = {row["resource_type"]} and resource_name = '{name}'
            and list_has_any(apis, [{listed}])
        """
    )
    return bool(found["n"])


# What happens more or less often


def _errors(database: Database) -> list[Change]:
    rows = database.rows(
        """
        with tried as (
            select api_name, count(*) filter (side = 'a') n_a, count(*) filter (side = 'b') n_b
            from x where status <> 'no_response_expected' group by all
        ), failed as (
            select side, api_name, unnest(error_codes) error_code from x
            union all select side, api_name, null from x
            where status in ('connection_closed', 'response_missing')
        ), counted as (
            select api_name, error_code, count(*) filter (side = 'a') count_a,
                count(*) filter (side = 'b') count_b
            from failed group by all
        )
        select * from counted join tried using (api_name) order by api_name, error_code
        """
    )
    from kdissect.protocol.error_codes import error_name

    p_values = holm(
        [share_test(row["count_a"], row["n_a"], row["count_b"], row["n_b"]) for row in rows]
    )
    changes = []
    for row, p_value in zip(rows, p_values, strict=True):
        change = _error_change(row, p_value)
        if change is not None:
            code = row["error_code"]
            changes.append(
                {
                    "api_name": row["api_name"],
                    "error_code": code,
                    "error_name": NO_ANSWER if code is None else error_name(code),
                    **{name: row[name] for name in ("count_a", "count_b", "n_a", "n_b")},
                    "p_value": p_value,
                    "change": change,
                    "is_worse": change == "more" or (change == "appeared" and p_value < ALPHA),
                }
            )
    return changes


def _error_change(row: dict[str, Any], p_value: float) -> str | None:
    if not row["n_a"] or not row["n_b"]:
        return None  # the API itself came or went
    if row["error_code"] is None and p_value >= ALPHA:
        return None  # at the end of a capture some requests always wait for their answers
    if not row["count_a"]:
        return "appeared"
    if not row["count_b"]:
        return "gone"
    ratio = (row["count_b"] / row["n_b"]) / (row["count_a"] / row["n_a"])
    if p_value >= ALPHA or 1 / ERROR_RATIO_MIN < ratio < ERROR_RATIO_MIN:
        return None
    return "more" if ratio > 1 else "fewer"


# What takes longer, or is larger


def _latency(database: Database) -> list[Change]:
    rows = distributions(database, "own_ms", "api, wait", "own_ms >= 0")
    return _measured(rows, "slower", "faster", lambda row: row["wait"] == "answer")


def _sizes(database: Database) -> list[Change]:
    found = []
    for part in ("request", "response"):
        rows = distributions(database, f"{part}_size", "api")
        found += [{"part": part, **row} for row in rows]
    rows = distributions(database, "size", "topic", table="batches")
    found += [{"part": "batch", **row} for row in rows]
    return _measured(found, "larger", "smaller", lambda row: False)


def _measured(
    rows: list[dict[str, Any]], more: str, less: str, can_worsen: Callable[[Change], bool]
) -> list[Change]:
    """Each sample pair with its tests; `change` is None where there is none to tell of."""
    rows = [plain(row) for row in rows if row["n_a"] and row["n_b"]]
    large = [row for row in rows if min(row["n_a"], row["n_b"]) >= SAMPLE_MIN]
    tests: list[float] = []
    for row in large:
        test = rank_test(row["n_a"], row["n_b"], row["larger_b"], row["ties"])
        row["delta"] = test.delta
        tests.append(test.p_value)
        if min(row["n_a"], row["n_b"]) >= TAIL_SAMPLE_MIN:
            tests.append(share_test(row["tail_a"], row["n_a"], row["tail_b"], row["n_b"]))
    adjusted = iter(holm(tests))
    for row in large:
        row["p_value"] = next(adjusted)
        if min(row["n_a"], row["n_b"]) >= TAIL_SAMPLE_MIN:
            row["tail_p_value"] = next(adjusted)
    for row in rows:
        _judge(row, more, less)
        row["is_worse"] = row["change"] in (more, "heavier tail") and can_worsen(row)
        for name in ("larger_b", "ties"):
            del row[name]
    return rows


def _judge(row: Change, more: str, less: str) -> None:
    """Say what changed: the whole distribution, else its tail, else nothing."""
    row["change"] = None
    row["is_enough"] = "delta" in row
    if not row["is_enough"]:
        row.update(delta=None, p_value=None)
    row.setdefault("tail_p_value", None)
    if not row["is_enough"]:
        return
    if row["p_value"] < ALPHA and abs(row["delta"]) >= DELTA_MIN and _moved(row):
        row["change"] = more if row["delta"] > 0 else less
        return
    if row["tail_p_value"] is not None and row["tail_p_value"] < ALPHA:
        share_a, share_b = (row[f"tail_{side}"] / row[f"n_{side}"] for side in SIDES)
        if share_b >= TAIL_RATIO_MIN * share_a:
            row["change"] = "heavier tail"
        elif share_a >= TAIL_RATIO_MIN * share_b:
            row["change"] = "lighter tail"


def _moved(row: Change) -> bool:
    """Whether a typical value moved by as much as people would notice, in the same direction."""
    for name in PERCENTILES:
        low, high = sorted((row[f"{name}_a"], row[f"{name}_b"]))
        if high > 0 and high >= RATIO_MIN * low:
            return (row[f"{name}_b"] > row[f"{name}_a"]) == (row["delta"] > 0)
    return False


_FINDERS: dict[str, Callable[[Database], list[Change]]] = {
    "apis": _apis,
    "versions": _versions,
    "clients": _clients,
    "errors": _errors,
    "latency": _latency,
    "sizes": _sizes,
    "configs": _configs,
}
KINDS = tuple(_FINDERS)
_MEASURED = ("latency", "sizes")
_WORSENING = ("errors", "latency")

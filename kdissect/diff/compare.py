"""Compares two captures: which APIs, clients, errors, latencies and settings changed.

Each kind has a list of changes, and each change has `change` (a word for it) and `is_worse`: an
error that appeared, a latency that grew. A mere difference is not worse. A latency, a size or a
share of errors counts as changed if the difference is beyond chance (`statistics`) and large enough
to matter (the limits below). A large difference is `not compared` if it rests on too few
connections or moments for any test. It is `undecided` if they are too few for a test among so many,
or if chance is unlikely but not excluded (POSSIBLE_RATE).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kdissect.diff.collect import (
    COMPARED,
    TAILS,
    distributions,
    failures,
    of_both,
    open_both,
    prepare,
)
from kdissect.diff.sample_tests import FALSE_ALARM_RATE, SampleTest, SampleTests
from kdissect.errors import Error
from kdissect.protocol.error_codes import error_name, routine_reason
from kdissect.sql import Database
from kdissect.tables.schemas import Row
from kdissect.text import rfc3339

if TYPE_CHECKING:
    from kdissect.api import Tables

_FORMAT_VERSION = 1
SAMPLE_MIN = 20  # exchanges on each side; fewer are not compared
TAIL_SAMPLE_MIN = 100  # exchanges on each side, to compare the slowest tenth and twentieth
TAIL_RATIO_MIN = 2.0
ERROR_RATIO_MIN = 1.5
ERROR_SHARE_MIN = 0.001  # of the requests: a smaller difference of shares does not matter
POSSIBLE_RATE = 0.1  # a large difference with a p-value between the two rates is undecided
UNDECIDED = "undecided"  # more connections or moments might decide
NOT_COMPARED = "not compared"  # so few units cannot exclude chance, whatever the difference
OPEN = (UNDECIDED, NOT_COMPARED)
NO_ANSWER = "(no answer)"
RESOURCES = {2: "topic", 4: "broker", 8: "broker logger", 16: "client metrics", 32: "group"}

Change = Row


class UnknownKind(Error, ValueError):
    """`--fail-on` names a kind that does not exist."""


def compare(a: Tables, b: Tables, *, memory_limit: str | None = None) -> Row:
    """Return the changes from `a` to `b` as a document for JSON.

    ``a`` and ``b`` describe the two sides (numbers of exchanges, connections and clients,
    duration). ``changes`` has a list for each of `KINDS`. ``compared`` has all errors,
    durations, round trips and sizes with their tests, changed or not.
    """
    with open_both(a, b, memory_limit) as database:
        prepare(database)
        compared = _compare_samples(database)
        changes = {
            kind: database.rows(_FACTS[kind])
            if kind in _FACTS
            else [row for row in compared[kind] if row["change"] is not None]
            for kind in KINDS
        }
        sides = {side: _side(database, side) for side in COMPARED}
    return {"format_version": _FORMAT_VERSION, **sides, "changes": changes, "compared": compared}


def failing(document: Row, kinds: Sequence[str]) -> list[str]:
    """Return those of the kinds on which ``--fail-on`` exits with an error.

    Errors and durations fail on a change for the worse, other kinds on any that is decided.
    """
    return [
        kind
        for kind in kinds
        if any(
            row["is_worse"] or (kind not in _WORSENING and row["change"] not in OPEN)
            for row in document["changes"][kind]
        )
    ]


def parse_kinds(text: str | None) -> list[str]:
    """Split ``errors,latency`` at its commas; raises UnknownKind."""
    kinds = [kind.strip() for kind in (text or "").split(",") if kind.strip()]
    for kind in kinds:
        if kind not in KINDS:
            raise UnknownKind(f"--fail-on {kind}: no such kind; there are {', '.join(KINDS)}")
    return kinds


def _side(database: Database, side: str) -> Row:
    row = database.row(
        f"""
        select count(*) exchange_count, count(distinct connection_id) connection_count,
            count(distinct (client_ip, client_id)) filter (status <> 'request_missing')
                client_count,
            min(coalesce(request_time, response_time)) first_time,
            max(coalesce(response_end_time, request_end_time)) last_time,
            (epoch_us(last_time) - epoch_us(first_time)) / 1e6 duration_s,
            (select coalesce(sum(request_missing_byte_count + response_missing_byte_count), 0)
                from {side}_connections where is_kafka)::bigint missing_byte_count,
            (select count(*) from x where side = '{side}' and may_be_lost) unjudged_count
        from {side}_exchanges
        """
    )
    for name in ("first_time", "last_time"):
        row[name] = None if row[name] is None else rfc3339(row[name])
    return row


# Present on one side only, or with other properties

_PRESENCE = "CASE WHEN count_a > 0 THEN 'removed' ELSE 'added' END AS change, false AS is_worse"
_APIS = f"""
    SELECT api_name, count(*) FILTER (side = 'a') AS count_a,
      count(*) FILTER (side = 'b') AS count_b, {_PRESENCE}
    FROM x GROUP BY api_name
    HAVING (count_a = 0 OR count_b = 0) AND bool_or(status <> 'request_missing')
    ORDER BY api_name
"""
# Versions that only one side uses, of APIs that both use. A version that only responses without
# their requests have is a guess, and no change.
_VERSIONS = f"""
    WITH counted AS (
      SELECT api_name, api_version, count(*) FILTER (side = 'a') AS count_a,
        count(*) FILTER (side = 'b') AS count_b,
        bool_or(status <> 'request_missing') AS is_certain
      FROM x WHERE api_version IS NOT NULL GROUP BY ALL
    )
    SELECT * EXCLUDE (is_certain), {_PRESENCE} FROM counted QUALIFY is_certain
      AND (count_a = 0 OR count_b = 0) AND sum(count_a) OVER (PARTITION BY api_name) > 0
      AND sum(count_b) OVER (PARTITION BY api_name) > 0
    ORDER BY api_name, api_version
"""
_CLIENT_FIELDS = {"software": "software", "principals": "principal", "addresses": "client_ip"}
_CLIENT_LISTS = ", ".join(
    f"coalesce(list_sort(list(DISTINCT {column}) FILTER (side = '{side}' AND {column} <> '')), []) "
    f"AS {name}_{side}"
    for name, column in _CLIENT_FIELDS.items()
    for side in COMPARED
)
_CHANGED = ", ".join(f"CASE WHEN {name}_a <> {name}_b THEN '{name}' END" for name in _CLIENT_FIELDS)
_OF_CLIENTS = """
    SELECT x.side, x.client_id, x.client_ip, c.principal,
      concat_ws(' ', c.client_software_name, c.client_software_version) AS software
    FROM x JOIN {side}_connections c USING (connection_id)
    WHERE x.side = '{side}' AND x.status <> 'request_missing'
"""
# Clients by ID: new, missing, or with other software, principals or addresses.
_CLIENTS = f"""
    WITH clients AS (
      SELECT client_id, count(*) FILTER (side = 'a') AS count_a,
        count(*) FILTER (side = 'b') AS count_b, {_CLIENT_LISTS}
      FROM ({of_both(_OF_CLIENTS)}) GROUP BY client_id
    ), compared AS (
      SELECT *, {_PRESENCE}, count_a > 0 AND count_b > 0 AS is_in_both,
        CASE WHEN is_in_both THEN list_filter([{_CHANGED}], lambda name: name IS NOT NULL)
          ELSE [] END AS fields
      FROM clients
    )
    SELECT * EXCLUDE (is_in_both)
      REPLACE (CASE WHEN is_in_both THEN 'changed' ELSE change END AS change)
    FROM compared WHERE NOT is_in_both OR len(fields) > 0 ORDER BY client_id NULLS FIRST
"""
# Changed settings, read or written. A setting that only one side has counts if both sides saw its
# resource, and if the other side used one of the same APIs on it.
_CONFIGS = f"""
    WITH known AS (
      SELECT resource_type, resource_name,
        flatten(list(apis) FILTER (side = 'a')) AS used_a,
        flatten(list(apis) FILTER (side = 'b')) AS used_b
      FROM configs GROUP BY ALL HAVING count(DISTINCT side) = 2
    ), paired AS (
      SELECT resource_type, resource_name, config, used_a, used_b,
        any_value(value) FILTER (side = 'a') AS value_a,
        any_value(value) FILTER (side = 'b') AS value_b,
        any_value(apis) FILTER (side = 'a') AS apis_a,
        any_value(apis) FILTER (side = 'b') AS apis_b
      FROM configs JOIN known USING (resource_type, resource_name) GROUP BY ALL
    )
    SELECT coalesce(map({list(RESOURCES)}, {list(RESOURCES.values())})[resource_type],
        resource_type::VARCHAR) AS resource_type,
      resource_name, config, value_a, value_b, false AS is_worse,
      CASE WHEN apis_a IS NULL THEN 'added' WHEN apis_b IS NULL THEN 'removed' ELSE 'changed' END
        AS change
    FROM paired WHERE CASE change WHEN 'added' THEN list_has_any(apis_b, used_a)
      WHEN 'removed' THEN list_has_any(apis_a, used_b) ELSE value_a IS DISTINCT FROM value_b END
    ORDER BY paired.resource_type, resource_name, config
"""
_FACTS = {"apis": _APIS, "versions": _VERSIONS, "clients": _CLIENTS, "configs": _CONFIGS}


# More or less frequent, slower, or larger


class Measure(NamedTuple):
    """The words and limits for one kind of value.

    A percentile has moved if it grew or shrank by the factor `ratio` or more, and by `least` or
    more (ms or bytes, by percentile).
    """

    more: str
    less: str
    ratio: float
    least: dict[str, float]


_LATENCY = Measure("slower", "faster", 1.5, {"p50": 3.0, "p90": 3.0})
_TAIL = Measure("heavier tail", "lighter tail", 1.5, {"p90": 3.0, "p95": 10.0, "p99": 20.0})
_ROUND_TRIP = Measure("longer", "shorter", 1.5, {"p50": 1.0})
SIZE_EFFECT = Measure("larger", "smaller", 1.2, {"p50": 16, "p95": 16})


def _compare_samples(database: Database) -> dict[str, list[Change]]:
    """Compare errors, durations, round trips and sizes in one family of tests, with one level."""
    errors = failures(database)
    latency = distributions(database, "service_ms", "api, wait", "service_ms >= 0")
    transfers = {
        part: distributions(database, f"{part}_ms", "api", f"{part}_ms >= 0")
        for part in ("upload", "download")
    }
    round_trips = distributions(
        database, "rtt_ms", "client_id, end_point, percentile", table="round_trips"
    )
    sizes = {
        "request": distributions(database, "request_size", "api"),
        "response": distributions(database, "response_size", "api"),
        "batch": distributions(database, "size", "topic", table="batches"),
    }
    numbered = database.table("select side = 'b' is_b, client from numbered order by connection")
    tests = SampleTests(numbered["is_b"].to_numpy().astype(bool), numbered["client"].to_numpy())
    tests.add(errors, "failed", SAMPLE_MIN)
    for samples in (latency, *transfers.values(), round_trips, *sizes.values()):
        tests.add(samples, "midrank", SAMPLE_MIN)
    for samples in (latency, *transfers.values()):
        for tail in TAILS:
            tests.add(samples, tail, TAIL_SAMPLE_MIN)
    tests.run()
    return {
        "errors": [_judge_error(row) for row in errors.rows],
        "latency": [_judge_duration(row) for row in latency.rows],
        "transfers": [
            _judge_duration({"part": part, **row})
            for part, samples in transfers.items()
            for row in samples.rows
        ],
        "round_trips": [_judge(row, _ROUND_TRIP) for row in round_trips.rows],
        "sizes": [
            _judge({"part": part, **row}, SIZE_EFFECT)
            for part, samples in sizes.items()
            for row in samples.rows
        ],
    }


def _judge_error(row: Change) -> Change:
    """Return the change of an error: new and missing ones are facts, more and fewer need a test."""
    test = row.pop("failed")
    code = row.pop("error_code")
    name = NO_ANSWER if code is None else error_name(code)
    share_a, share_b = (row[f"count_{side}"] / row[f"n_{side}"] for side in COMPARED)
    low, high = sorted((share_a, share_b))
    matters = high - low >= ERROR_SHARE_MIN and high >= ERROR_RATIO_MIN * low
    is_certain = matters and test.p_value < FALSE_ALARM_RATE
    change = None
    if code is not None and not (share_a and share_b):
        change = "gone" if share_a else "appeared"
    elif is_certain:
        change = "more" if share_b > share_a else "fewer"
    elif matters:
        change = _open(test)
    return {
        "api_name": row["api_name"],
        "error_code": code,
        "error_name": name,
        **row,
        "p_value": test.p_value,
        "change": change,
        "too_few": test.too_few,
        "is_decided": test.is_decided and change not in OPEN and _is_enough(row),
        "is_worse": is_certain
        and share_b > share_a
        and routine_reason(row["api_name"], name) is None,
    }


def _judge_duration(row: Change) -> Change:
    """Return the change of a duration: of the whole distribution, otherwise of a tail.

    A longer wait for records or for members of a group is not worse.
    """
    tails = {name: row.pop(name) for name in TAILS}
    change = _judge(row, _LATENCY)
    if change["change"] in (None, *OPEN):
        for name, tail in tails.items():
            word = _tail_change(row, name, tail)
            if word not in (None, *OPEN) or change["change"] is None:
                change["change"] = word
    can_worsen = row.get("wait", "answer") == "answer"
    change["tail_p_value"] = min(tail.p_value for tail in tails.values())
    change["is_decided"] = change["change"] not in OPEN
    change["is_worse"] = can_worsen and change["change"] in (_LATENCY.more, _TAIL.more)
    return change


def _tail_change(row: Change, name: str, test: SampleTest) -> str | None:
    """Return the change of a tail, if its percentiles and its share moved in one direction."""
    share_a, share_b = (row[f"{name}_{side}"] / row[f"n_{side}"] for side in COMPARED)
    low, high = sorted((share_a, share_b))
    moved = _moved(row, _TAIL)
    if moved * (share_b - share_a) <= 0 or high < TAIL_RATIO_MIN * low:
        return None
    if test.p_value < FALSE_ALARM_RATE:
        return _TAIL.more if moved > 0 else _TAIL.less
    return _open(test)


def _judge(row: Change, measure: Measure) -> Change:
    """Return the row with the change that its test and the moved percentiles prove, if any."""
    test = row.pop("midrank")
    moved = _moved(row, measure)
    change = None
    if moved * row["delta"] > 0 and test.p_value < FALSE_ALARM_RATE:
        change = measure.more if moved > 0 else measure.less
    elif moved:
        change = _open(test)
    return {
        **row,
        "p_value": test.p_value,
        "change": change,
        "too_few": test.too_few if _is_enough(row) else "exchanges",
        "is_decided": change not in OPEN,
        "is_worse": False,
    }


def _open(test: SampleTest) -> str | None:
    """Return the word for a large difference that its test did not decide; None if chance explains
    it."""
    if test.too_few:
        return NOT_COMPARED
    return UNDECIDED if not test.is_decided or test.p_value < POSSIBLE_RATE else None


def _is_enough(row: Change) -> bool:
    return bool(min(row["n_a"], row["n_b"]) >= SAMPLE_MIN)


def _moved(row: Change, measure: Measure) -> int:
    """Return 1 if a percentile grew by as much as matters, -1 if one shrank, 0 otherwise."""
    for name, least in measure.least.items():
        a, b = (row[f"{name}_{side}"] for side in COMPARED)
        low, high = sorted((a, b))
        if high >= measure.ratio * low and high - low >= least:
            return 1 if b > a else -1
    return 0


KINDS = (
    *("apis", "versions", "clients", "errors", "latency", "transfers", "round_trips", "sizes"),
    "configs",
)
_WORSENING = ("errors", "latency", "transfers")

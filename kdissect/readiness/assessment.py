"""Finds clients that would break on another Kafka release, by their requests.

A request below the lowest version that the target accepts is a finding. A request above its highest
version is none, because clients fall back to what a broker offers. The verdict on a finding depends
on why the client used the old version:

- its software and release are known, and so are the versions of that release: they decide
  (`Software.speaks_enough`);
- a broker offered a higher version and the client did not use it, or the client never asks for
  offered versions: it cannot do better, or is configured not to, and it **breaks**;
- it used the highest version that its brokers offered, so it may support newer ones: **unknown**.

An API that the target lacks is a finding too, unless clients do without it. An API that the target
has only if a setting enables it is **unknown**. Message formats 0 and 1 depend on the Produce
versions that carry them.

**ok** needs more than no findings: the client's role (`roles`) must be seen at work. Suppose that
the role needs an API, that the target does not accept all its versions, and that the client never
sent it. Then the verdict is **unknown**, unless the software is known to support enough versions.

Connections among brokers and controllers are listed apart and do not count, because these are
upgraded with the cluster. `kdissect.protocol.releases` has the versions of each release.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kdissect.errors import Error
from kdissect.protocol.api_keys import INTER_BROKER_APIS, ApiKey
from kdissect.protocol.model import VersionRange
from kdissect.protocol.releases import facts, find_release, release_number, releases
from kdissect.protocol.releases import spoken_versions as spoken_by
from kdissect.readiness.client_tables import make_client_tables
from kdissect.readiness.roles import find_roles, needed_apis
from kdissect.readiness.software import JAVA, Behaviour, Software, java_hint, minor
from kdissect.sql import Database
from kdissect.tables.value_text import json_value

_FORMAT_VERSION = 1
BREAKS, UNKNOWN, OK = "breaks", "unknown", "ok"
VERDICTS = (BREAKS, UNKNOWN, OK)  # worst first

MAGIC_2_PRODUCE = 3  # the first Produce version with magic 2 only
# Requests of these APIs fail without harm: the client uses another API, or does without.
DISPENSABLE_APIS = frozenset(
    {
        ApiKey.DESCRIBE_CLUSTER, ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY,
        ApiKey.DESCRIBE_TOPIC_PARTITIONS, ApiKey.CONSUMER_GROUP_DESCRIBE
    }
)  # fmt: skip
# APIs that are off by default: (first release that enables it in new clusters, setting). KIP-848,
# KIP-932.
SETTINGS = {
    ApiKey.CONSUMER_GROUP_HEARTBEAT: (
        (4, 0),
        "group.coordinator.rebalance.protocols=classic,consumer",
    ),
    ApiKey.SHARE_GROUP_HEARTBEAT: ((4, 2), "the feature share.version=1"),
}


class ReadinessError(Error, ValueError):
    """The target release is not known."""


def assess(database: Database, target: str) -> dict[str, Any]:
    """Return a JSON document: the clients that would break on the release `target` (``4.0``).

    database: with the tables of `make_requests`.

    ``verdict``: the worst of ``clients``; at best ``unknown`` if TLS hides connections or there are
    no clients. ``counts``: clients by verdict. ``established_request_count``: requests of clients
    whose verdict is not ``unknown``. ``internal``: brokers and controllers. ``unseen``: what TLS or
    losses hide.
    ``clients``: each has ``address``, ``client_id``, ``software_name``, ``software_version``,
    ``principal``, ``verdict``, ``connection_count``, ``request_count``, ``first_time``,
    ``last_time``, ``roles``, ``findings``, ``never_seen``, ``formats`` (what it writes) and
    ``upgrade`` (what to do).
    ``findings``: each has a request's API, version and count, the versions that the target accepts
    (``taken``), those that the broker offered, the ``setting`` that the target needs, ``verdict``
    and ``why``. ``never_seen``: APIs that its roles need and it did not send, with ``verdict`` and
    ``why``.
    Raises ReadinessError for an unknown release.
    """
    try:
        release = find_release(target)
    except ValueError as error:
        raise ReadinessError(str(error)) from error
    make_client_tables(database)
    clients = _clients(database, release)
    internal = _internal(database, release)
    unseen = _unseen(database)
    counts = {verdict: sum(each["verdict"] == verdict for each in clients) for verdict in VERDICTS}
    verdict = _worst(each["verdict"] for each in clients)
    if verdict == OK and (unseen["tls_connection_count"] or not clients):
        verdict = UNKNOWN
    document: dict[str, Any] = {
        "format_version": _FORMAT_VERSION,
        "target": target,
        "release": release,
        "verdict": verdict,
        "counts": counts,
        "request_count": sum(each["request_count"] for each in clients),
        "established_request_count": sum(
            each["request_count"] for each in clients if each["verdict"] != UNKNOWN
        ),
        "clients": clients,
        "internal": internal,
        "unseen": unseen,
    }
    return {name: json_value(value) for name, value in document.items()}


def _worst(verdicts: Iterable[str]) -> str:
    return min(verdicts, key=VERDICTS.index, default=OK)


# Clients


_CLIENT = ("client_ip", "client_id", "software_name", "software_version", "principal")
_COUNTS = ("connection_count", "request_count", "first_time", "last_time")
_COLUMNS = ", ".join(f"o.{name}" for name in _CLIENT)
_OWNED = "asked r join owners o on o.connection_id = r.connection_id and " + (
    "o.client_id is not distinct from r.client_id"
)
_MEMBERSHIP = tuple(map(int, (ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP, ApiKey.HEARTBEAT)))


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in _CLIENT)


def _clients(database: Database, release: str) -> list[dict[str, Any]]:
    by_client: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in _requests(database, "not o.is_internal"):
        by_client.setdefault(_key(row), []).append(row)
    formats = _formats(database, release)
    clients = [
        _client(row, by_client[_key(row)], formats.get(_key(row), []), release)
        for row in database.rows(
            f"""
            select {_COLUMNS}, count(distinct r.connection_id) connection_count,
                count(*) request_count, min(request_time) first_time, max(request_time) last_time,
                coalesce(list(distinct protocol_type) filter (protocol_type is not null), [])
                    protocol_types,
                coalesce(bool_and(g.group_id is not null) filter (r.api_key in {_MEMBERSHIP}
                    and r.group_id is not null), false) commits_in_transactions
            from {_OWNED}
            left join protocols p using (exchange_id)
            left join transaction_groups g on g.group_id = r.group_id
            where not o.is_internal group by all
            """
        )
    ]
    names = ("address", "client_id", "software_name", "principal")
    return sorted(
        clients,
        key=lambda each: (VERDICTS.index(each["verdict"]), *(each[name] or "" for name in names)),
    )


def _client(
    row: dict[str, Any], requests: list[dict[str, Any]], formats: list[dict[str, Any]], release: str
) -> dict[str, Any]:
    """The assessment of one client. requests: by API and version. formats: that it writes."""
    roles = find_roles({each["api_key"] for each in requests}, set(row["protocol_types"]))
    behaviour = _behaviour(requests)
    judged = [_judged(each, behaviour, release) for each in requests if each["is_sure"]]
    findings = _merged([finding for finding in judged if finding is not None])
    never_seen = _never_seen(row, needed_apis(roles), requests, release)
    return {
        "address": row["client_ip"],
        **{name: row[name] for name in _CLIENT[1:]},
        "verdict": _worst(each["verdict"] for each in (*findings, *never_seen)),
        **{name: row[name] for name in _COUNTS},
        "roles": [role.name for role in roles],
        "findings": findings,
        "never_seen": never_seen,
        "formats": formats,
        "upgrade": _upgrade(row, findings, never_seen, release),
    }


def _requests(database: Database, condition: str) -> list[dict[str, Any]]:
    """Requests by client, API and version, with the versions that were offered.

    Offers are those on the same connection, else those of the same broker or to the same client.
    """
    return database.rows(
        f"""
        select {_COLUMNS}, r.api_key, r.api_version, r.is_sure,
            t.is_whole, t.is_negotiating, t.asked_with,
            coalesce(f.first, b.first, c.first) offered_first,
            case when f.last is not null then [f.last] else list_sort(list_distinct(
                list_concat(coalesce(b.lasts, []), coalesce(c.lasts, [])))) end offered_lasts,
            count(*) request_count, min(r.request_time) first_time,
            arg_min(r.exchange_id, (r.request_time, r.exchange_id)) first_exchange_id
        from {_OWNED}
        join traits t on t.client_ip = o.client_ip
            and t.client_id is not distinct from o.client_id
            and t.software_name is not distinct from o.software_name
        left join offers f on f.connection_id = r.connection_id and f.api_key = r.api_key
        left join broker_offers b on b.broker_ip = o.broker_ip and b.broker_port = o.broker_port
            and b.api_key = r.api_key
        left join client_offers c on c.client_ip = o.client_ip
            and c.client_id is not distinct from o.client_id
            and c.software_name is not distinct from o.software_name and c.api_key = r.api_key
        where {condition}
        group by all order by r.api_key, r.api_version
        """
    )


def _behaviour(requests: list[dict[str, Any]]) -> Behaviour | None:
    """Return a client's choice of versions; None if it is named, except Java without a release."""
    first = requests[0]
    software = Software(first["software_name"], first["software_version"])
    if software.name not in (None, JAVA) or software.spoken() is not None:
        return None
    return Behaviour(
        first["asked_with"],
        first["is_whole"],
        [
            (each["api_key"], each["api_version"], each["offered_lasts"])
            for each in requests
            if each["is_sure"]
        ],
    )


def _judged(
    row: dict[str, Any], behaviour: Behaviour | None, release: str
) -> dict[str, Any] | None:
    """A finding for a request that the release does not accept; None if it does no harm."""
    key, api_version = row["api_key"], row["api_version"]
    taken = spoken_by(release).get(key)
    setting = _setting(key, release)
    if taken is None:
        if key in DISPENSABLE_APIS or key not in facts().names:
            return None  # it does without the API, or no broker ever had it
        verdict, why = BREAKS, _missing_api(key, release)
    elif api_version < taken.first:
        verdict, why = _judged_version(row, behaviour, taken)
    elif setting is not None:
        verdict, why = UNKNOWN, f"{minor(release)} has it off unless {setting} is set"
    else:
        return None
    if verdict == OK:
        return None
    lasts = row["offered_lasts"]
    return {
        "api_key": key,
        "api_name": facts().names[key],
        "api_version": api_version,
        "request_count": row["request_count"],
        "taken": None if taken is None else [taken.first, taken.last],
        "offered": None if not lasts else [row["offered_first"], max(lasts)],
        "setting": setting,
        "verdict": verdict,
        "why": why,
        "first_time": row["first_time"],
        "first_exchange_id": str(row["first_exchange_id"]),
    }


def _setting(api_key: int, release: str) -> str | None:
    """The setting that enables an API on a release that has it off by default; None for others."""
    if api_key not in SETTINGS or api_key not in spoken_by(release):
        return None
    first_enabled, setting = SETTINGS[ApiKey(api_key)]
    return setting if release_number(release) < first_enabled else None


def _judged_version(
    row: dict[str, Any], behaviour: Behaviour | None, taken: VersionRange
) -> tuple[str, str]:
    software = Software(row["software_name"], row["software_version"])
    enough = software.speaks_enough(row["api_key"], taken)
    if enough is False:
        return BREAKS, f"{software} speaks none that the target takes"
    if row["is_whole"] and not row["is_negotiating"]:
        return BREAKS, "it never asks which versions a broker offers"
    lasts = row["offered_lasts"]
    if lasts and row["api_version"] not in lasts:
        return BREAKS, f"its broker offered up to {max(lasts)}"
    if enough:
        return OK, f"{software} speaks newer ones"
    why = (
        "its broker offered no higher one" if lasts else "what its broker offered was not captured"
    )
    hint = java_hint(behaviour, {row["api_key"]: taken}) if behaviour else ""
    return UNKNOWN, f"{why}{hint}"


def _never_seen(
    client: dict[str, Any],
    needs: dict[int, str | None],
    requests: list[dict[str, Any]],
    release: str,
) -> list[dict[str, Any]]:
    """APIs that a client needs and did not send, as far as the release may lack their versions.

    An API whose version 0 the release accepts is left out: every client supports some version of
    it.
    """
    software = Software(client["software_name"], client["software_version"])
    sent = {each["api_key"] for each in requests if each["is_sure"]}
    if client["commits_in_transactions"]:
        sent.add(ApiKey.OFFSET_COMMIT)
    missing = {
        key: taken
        for key, taken in sorted(spoken_by(release).items())
        if key in needs and key not in sent and taken.first > 0
    }
    behaviour = _behaviour(requests)
    hint = java_hint(behaviour, missing) if behaviour and missing else ""
    rows = []
    for key, taken in missing.items():
        role, enough = needs[key], software.speaks_enough(key, taken)
        verdict = {True: OK, False: BREAKS, None: UNKNOWN}[enough]
        why = {
            OK: f"{software} speaks what the target takes",
            BREAKS: f"{software} speaks none that the target takes",
            UNKNOWN: f"needed by a {role}{hint}"
            if role
            else "no role was seen, and it may need them",
        }[verdict]
        rows.append(
            {
                "api_key": key,
                "api_name": facts().names[key],
                "role": role,
                "taken": [taken.first, taken.last],
                "verdict": verdict,
                "why": why,
            }
        )
    return rows


def _missing_api(key: int, release: str) -> str:
    having = [each for each in releases() if key in spoken_by(each)]
    if release_number(having[0]) > release_number(release):
        return f"brokers have it from {minor(having[0])} on"
    return f"{minor(having[-1])} was the last to have it"


def _merged(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per API and version, with the worst verdict."""
    merged: dict[tuple[int, int], dict[str, Any]] = {}
    for finding in sorted(findings, key=lambda finding: VERDICTS.index(finding["verdict"])):
        place = (finding["api_key"], finding["api_version"])
        if place not in merged:
            merged[place] = finding
            continue
        kept = merged[place]
        kept["request_count"] += finding["request_count"]
        if finding["first_time"] < kept["first_time"]:
            kept["first_time"] = finding["first_time"]
            kept["first_exchange_id"] = finding["first_exchange_id"]
    return [merged[place] for place in sorted(merged)]


def _formats(database: Database, release: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Message formats that each client writes, and whether the release accepts them."""
    produce = spoken_by(release).get(ApiKey.PRODUCE)
    oldest = 2 if produce is None or produce.first >= MAGIC_2_PRODUCE else 0
    formats: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in database.rows(
        f"""
        select {_COLUMNS}, b.magic, count(*) batch_count, sum(b.record_count)::bigint record_count
        from {_OWNED} join record_batches b on b.exchange_id = r.exchange_id
        where b.source = 'produce' and b.magic is not null
        group by all order by b.magic
        """
    ):
        written = {name: row[name] for name in ("magic", "batch_count", "record_count")}
        formats.setdefault(_key(row), []).append({**written, "is_taken": row["magic"] >= oldest})
    return formats


def _upgrade(
    client: dict[str, Any],
    findings: list[dict[str, Any]],
    never_seen: list[dict[str, Any]],
    release: str,
) -> str | None:
    """Advice on the findings and the APIs that were never seen, in one sentence; None without
    any."""
    settings = [each for each in findings if each["setting"] is not None]
    old = [
        each
        for each in (*findings, *never_seen)
        if each["taken"] is not None and each["verdict"] != OK and each not in settings
    ]
    missing = [each["api_name"] for each in findings if each["taken"] is None]
    words = []
    if any("request_count" in each or each["verdict"] == BREAKS for each in old):
        ready = _ready_java(release)
        since = f" (kafka-clients {minor(ready)} or newer)" if ready else ""
        least = ", ".join(
            f"{name} {first}"
            for name, first in dict.fromkeys((each["api_name"], each["taken"][0]) for each in old)
        )
        name = client["software_name"] or "the client library"
        words.append(
            f"upgrade {name}, or lift the protocol version it is configured for, until it speaks "
            f"{least}{since}"
        )
    elif old:
        unseen = ", ".join(each["api_name"] for each in old)
        words.append(f"capture it at work until it sends {unseen}, or look up what it speaks")
    for each in settings:
        words.append(f"set {each['setting']} on {minor(release)}, or do without {each['api_name']}")
    if missing:
        words.append(f"do without {', '.join(dict.fromkeys(missing))} on {minor(release)}")
    return "; ".join(dict.fromkeys(words)) or None


def _ready_java(release: str) -> str | None:
    """The first release whose Java clients support what this one accepts, in every API they
    have."""
    taken = spoken_by(release)
    for candidate in releases():
        supported = spoken_by(candidate)
        if all(
            versions.last >= taken[key].first
            for key, versions in supported.items()
            if key in taken and key not in INTER_BROKER_APIS and key != ApiKey.WRITE_TXN_MARKERS
        ):
            return candidate
    return None


# What does not count, and what cannot be seen


def _internal(database: Database, release: str) -> list[dict[str, Any]]:
    """Brokers and controllers by address and client id, with requests that the release refuses."""
    callers = {
        (row["address"], row["client_id"]): {**row, "not_taken": []}
        for row in database.rows(
            f"""
            select o.client_ip address, o.client_id,
                count(distinct r.connection_id) connection_count, count(*) request_count
            from {_OWNED} where o.is_internal group by all order by all
            """
        )
    }
    for row in _requests(database, "o.is_internal and r.is_sure"):
        taken = spoken_by(release).get(row["api_key"])
        if taken is not None and row["api_version"] >= taken.first:
            continue
        callers[row["client_ip"], row["client_id"]]["not_taken"].append(
            {
                "api_key": row["api_key"],
                "api_name": facts().names.get(row["api_key"], str(row["api_key"])),
                "api_version": row["api_version"],
                "request_count": row["request_count"],
            }
        )
    return list(callers.values())


def _unseen(database: Database) -> dict[str, Any]:
    """Traffic without evidence: TLS without secrets, requests that were not captured."""
    return database.row(
        """
        select
            (select count(*) from connections where is_tls and not is_kafka) tls_connection_count,
            (select coalesce(list(distinct client_ip order by client_ip), []) from connections
                where is_tls and not is_kafka) tls_addresses,
            (select count(*) from asked where not is_sure) undetermined_exchange_count
        """
    )

"""Finds clients that would break on another Kafka release, by their requests.

A request below the lowest version that the target accepts is a finding. A request above its highest
version is one only if its client was not seen asking what a broker offers: others fall back to the
offer. The verdict on a finding depends on why the client used the version:

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

from kdissect.protocol.api_keys import INTER_BROKER_APIS, ApiKey
from kdissect.protocol.model import VersionRange
from kdissect.protocol.releases import facts, find_release, release_number, releases
from kdissect.protocol.releases import spoken_versions as spoken_by
from kdissect.readiness.client_tables import make_client_tables
from kdissect.readiness.roles import find_roles, needed_apis
from kdissect.readiness.software import Software, java_hint, minor
from kdissect.sql import Database
from kdissect.sql.sessions import UNREAD_TLS
from kdissect.tables.schemas import Row
from kdissect.tables.value_text import json_value

_FORMAT_VERSION = 1
BREAKS, UNKNOWN, OK = "breaks", "unknown", "ok"
VERDICTS = (BREAKS, UNKNOWN, OK)  # worst first

MAGIC_2_PRODUCE = 3  # the first Produce version with magic 2 only
# Requests of these APIs fail without harm: the client uses another API, or does without.
DISPENSABLE_APIS = (
    *(ApiKey.DESCRIBE_CLUSTER, ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY),
    *(ApiKey.DESCRIBE_TOPIC_PARTITIONS, ApiKey.CONSUMER_GROUP_DESCRIBE),
)
# APIs that are off by default: (first release that enables it in new clusters, setting). KIP-848,
# KIP-932.
SETTINGS = {
    ApiKey.CONSUMER_GROUP_HEARTBEAT: (
        (4, 0),
        "group.coordinator.rebalance.protocols=classic,consumer",
    ),
    ApiKey.SHARE_GROUP_HEARTBEAT: ((4, 2), "the feature share.version=1"),
}


_COLUMNS = (
    *("address", "client_id", "software_name", "software_version", "principal"),
    *("connection_count", "request_count", "first_time", "last_time"),
)
_MEMBERSHIP = tuple(map(int, (ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP, ApiKey.HEARTBEAT)))


def assess(database: Database, target: str) -> Row:
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
    Raises UnknownRelease for an unknown one.
    """
    release = find_release(target)
    make_client_tables(database)
    clients = _clients(database, release)
    internal = _internal(database, release)
    unseen = _unseen(database)
    counts = {verdict: sum(each["verdict"] == verdict for each in clients) for verdict in VERDICTS}
    verdict = _worst(each["verdict"] for each in clients)
    if verdict == OK and (unseen["tls_connection_count"] or not clients):
        verdict = UNKNOWN
    document: Row = {
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


def _clients(database: Database, release: str) -> list[Row]:
    """Return the assessed clients, the worst first."""
    produce = spoken_by(release).get(ApiKey.PRODUCE)
    oldest = 2 if produce is None or produce.first >= MAGIC_2_PRODUCE else 0
    rows = database.rows(
        f"""
        with used as (
            select client, list(uses order by api_key, api_version) uses
            from uses where not is_internal group by client
        ), formats as (
            select client, b.magic, count(*) batch_count,
                sum(b.record_count)::bigint record_count, b.magic >= {oldest} is_taken
            from asked join record_batches b using (exchange_id)
            where b.source = 'produce' and b.magic is not null group by all
        ), written as (
            select client, list(struct_pack(magic, batch_count, record_count, is_taken)
                order by magic) formats
            from formats group by client
        )
        select a.client_ip address, a.client_id, a.software_name, a.software_version, a.principal,
            count(distinct a.connection_id) connection_count, count(*) request_count,
            min(a.request_time) first_time, max(a.request_time) last_time,
            any_value(formats) formats, any_value(uses) uses, t.is_whole, t.is_negotiating,
            t.asked_with,
            coalesce(list(distinct j.request.protocol_type)
                filter (j.request.protocol_type is not null), []) protocol_types,
            coalesce(bool_and(g.group_id is not null) filter (a.api_key in {_MEMBERSHIP}
                and a.group_id is not null), false) commits_in_transactions
        from asked a join traits t using (caller) join used using (client)
        left join written using (client) left join api_join_group j using (exchange_id)
        left join transaction_groups g on g.group_id = a.group_id
        where not a.is_internal group by all
        """
    )
    names = ("address", "client_id", "software_name", "principal")
    return sorted(
        (_client(row, release) for row in rows),
        key=lambda each: (
            VERDICTS.index(each["verdict"]),
            *(each[name] or "" for name in names),
            each["first_time"],
        ),
    )


def _client(row: Row, release: str) -> Row:
    """The assessment of one client."""
    sure = [use for use in row["uses"] if use["is_sure"]]
    roles = find_roles({use["api_key"] for use in row["uses"]}, set(row["protocol_types"]))
    judged = [_judged(row, use, release) for use in sure]
    findings = _merged([finding for finding in judged if finding is not None])
    never_seen = _never_seen(row, needed_apis(roles), sure, release)
    return {
        **{name: row[name] for name in _COLUMNS},
        "verdict": _worst(each["verdict"] for each in (*findings, *never_seen)),
        "roles": [role.name for role in roles],
        "findings": findings,
        "never_seen": never_seen,
        "formats": row["formats"] or [],
        "upgrade": _upgrade(row, findings, never_seen, release),
    }


def _judged(client: Row, use: Row, release: str) -> Row | None:
    """A finding for a version that the release does not accept; None if it does no harm."""
    key, api_version = use["api_key"], use["api_version"]
    taken = spoken_by(release).get(key)
    setting = _setting(key, release)
    if taken is None:
        if key in DISPENSABLE_APIS or key not in facts().names:
            return None  # it does without the API, or no broker ever had it
        verdict, why = BREAKS, _missing_api(key, release)
    elif api_version < taken.first or (api_version > taken.last and not client["is_negotiating"]):
        verdict, why = _judged_version(client, use, taken)
    elif setting is not None:
        verdict, why = UNKNOWN, f"{minor(release)} has it off unless {setting} is set"
    else:
        return None
    if verdict == OK:
        return None
    lasts = use["offered_lasts"]
    return {
        "api_key": key,
        "api_name": facts().names[key],
        "api_version": api_version,
        "request_count": use["request_count"],
        "taken": None if taken is None else [taken.first, taken.last],
        "offered": None if not lasts else [use["offered_first"], max(lasts)],
        "setting": setting,
        "verdict": verdict,
        "why": why,
        "first_time": use["first_time"],
        "first_exchange_id": str(use["first_exchange_id"]),
    }


def _setting(api_key: int, release: str) -> str | None:
    """The setting that enables an API on a release that has it off by default; None for others."""
    if api_key not in SETTINGS or api_key not in spoken_by(release):
        return None
    first_enabled, setting = SETTINGS[ApiKey(api_key)]
    return setting if release_number(release) < first_enabled else None


def _judged_version(client: Row, use: Row, taken: VersionRange) -> tuple[str, str]:
    software = Software(client["software_name"], client["software_version"])
    enough = software.speaks_enough(use["api_key"], taken)
    if enough is False:
        return BREAKS, f"{software} speaks none that the target takes"
    if client["is_whole"] and not client["is_negotiating"]:
        return BREAKS, "it never asks which versions a broker offers"
    if use["api_version"] > taken.last:
        return UNKNOWN, "whether it asks which versions a broker offers was not captured"
    lasts = use["offered_lasts"]
    if lasts and use["api_version"] not in lasts:
        return BREAKS, f"its broker offered up to {max(lasts)}"
    if enough:
        return OK, f"{software} speaks newer ones"
    why = (
        "its broker offered no higher one" if lasts else "what its broker offered was not captured"
    )
    return UNKNOWN, why + java_hint(client, {use["api_key"]: taken})


def _never_seen(
    client: Row, needs: dict[int, str | None], sure: list[Row], release: str
) -> list[Row]:
    """APIs that a client needs and did not send, as far as the release may lack their versions.

    sure: the known versions that it sent. An API whose version 0 the release accepts is left out:
    every client supports some version of it.
    """
    software = Software(client["software_name"], client["software_version"])
    sent = {use["api_key"] for use in sure}
    if client["commits_in_transactions"]:
        sent.add(ApiKey.OFFSET_COMMIT)
    missing = {
        key: taken
        for key, taken in sorted(spoken_by(release).items())
        if key in needs and key not in sent and taken.first > 0
    }
    hint = java_hint(client, missing) if missing else ""
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


def _merged(findings: list[Row]) -> list[Row]:
    """One row per API and version, with the worst verdict."""
    merged: dict[tuple[int, int], Row] = {}
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


def _upgrade(client: Row, findings: list[Row], never_seen: list[Row], release: str) -> str | None:
    """Advice on the findings and the APIs that were never seen, in one sentence; None without
    any."""
    settings = [each for each in findings if each["setting"] is not None]
    refused = [
        each
        for each in (*findings, *never_seen)
        if each["taken"] is not None and each["verdict"] != OK and each not in settings
    ]
    new = [each for each in refused if each.get("api_version", 0) > each["taken"][1]]
    old = [each for each in refused if each not in new]
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
    if new:
        most = ", ".join(f"{each['api_name']} {each['taken'][1]}" for each in new)
        words.append(f"let it ask which versions a broker offers, or limit it to {most}")
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


def _internal(database: Database, release: str) -> list[Row]:
    """Brokers and controllers by address and client id, with requests that the release refuses."""
    rows = database.rows(
        """
        select client_ip address, client_id, count(distinct connection_id) connection_count,
            count(*) request_count, list(distinct client) clients
        from asked where is_internal group by all order by all
        """
    )
    uses = database.rows("from uses where is_internal and is_sure order by api_key, api_version")
    taken = spoken_by(release)
    for row in rows:
        clients = row.pop("clients")
        row["not_taken"] = [
            {
                "api_key": use["api_key"],
                "api_name": facts().names.get(use["api_key"], str(use["api_key"])),
                "api_version": use["api_version"],
                "request_count": use["request_count"],
            }
            for use in uses
            if use["client"] in clients
            and (use["api_key"] not in taken or use["api_version"] < taken[use["api_key"]].first)
        ]
    return rows


def _unseen(database: Database) -> Row:
    """Traffic without evidence: TLS without secrets, requests that were not captured."""
    return database.row(
        f"""
        select
            (select count(*) from connections where {UNREAD_TLS}) tls_connection_count,
            (select coalesce(list(distinct client_ip order by client_ip), []) from connections
                where {UNREAD_TLS}) tls_addresses,
            (select count(*) from asked where not is_sure) undetermined_exchange_count
        """
    )

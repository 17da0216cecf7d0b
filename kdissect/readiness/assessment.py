"""Who would break on another Kafka release: each client's requests against what that release takes.

A request below the lowest version that the target takes is a finding; one above its highest is
none, since clients come down to what a broker offers. Whether the client as such breaks depends on
why it used the old version:

- its software is known, by name and release, and so are the versions that this release speaks:
  these decide (`speaks_enough`);
- its broker offered a higher version and it did not take it, or it never asked what the broker
  offers: it cannot do better, or is told not to, and **breaks**;
- it used the highest version that its broker offered: it may well speak newer ones: **unknown**.

An API that the target does not have at all is a finding too, unless clients do without it. Message
formats 0 and 1 go with the Produce versions that carry them. The connections of brokers and
controllers among themselves are listed apart and do not count: they are upgraded with the cluster.

What a release takes is in `kdissect.protocol.releases`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kdissect.api import Tables
from kdissect.errors import Error
from kdissect.protocol.api_keys import INTER_BROKER_APIS, ApiKey
from kdissect.protocol.model import VersionRange
from kdissect.protocol.releases import facts, find_release, release_number, releases
from kdissect.protocol.releases import spoken_versions as spoken_by
from kdissect.sql import Database

FORMAT_VERSION = 1
BREAKS, UNKNOWN, OK = "breaks", "unknown", "ok"
VERDICTS = (BREAKS, UNKNOWN, OK)  # worst first

MAGIC_2_PRODUCE = 3  # the first Produce version that carries magic 2, and nothing older
JAVA = "apache-kafka-java"

# How Kafka's servers call themselves where nothing else in their requests shows it.
INTERNAL_CLIENT_IDS = (
    r"^(broker-\d+-(fetcher-\d+|txn-marker-sender)|raft-client-\d+|AddPartitionsManager-client-\d+"
    r"|AddPartitionsToTxnSenderThread-\d+|Persister-client-\d+"
    r"|NetworkPartitionMetadataClient-client-\d+)$"
)
# Requests of these APIs fail without harm: the client asks in another way, or goes without.
DISPENSABLE_APIS = frozenset(
    {
        ApiKey.DESCRIBE_CLUSTER, ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY,
        ApiKey.DESCRIBE_TOPIC_PARTITIONS,
    }
)  # fmt: skip
# Every connection may begin with these, whoever opens it.
_HANDSHAKES = tuple(
    map(int, (ApiKey.SASL_HANDSHAKE, ApiKey.API_VERSIONS, ApiKey.SASL_AUTHENTICATE))
)

# KIP-896: this release of librdkafka was checked to speak what Kafka 4.0 takes.
_LIBRDKAFKA = re.compile(r"rdkafka\W*v?(\d+)\.(\d+)\.(\d+)", re.IGNORECASE)
_LIBRDKAFKA_READY = (1, 8, 2)


class ReadinessError(Error, ValueError):
    """The target release is not known."""


@dataclass
class Software:
    """What a client told of itself; None: nothing."""

    name: str | None
    release: str | None

    def spoken(self) -> dict[int, VersionRange] | None:
        """The versions that it speaks by API key, where that is known: Java clients."""
        number = re.match(r"\d+\.\d+(\.\d+)*", self.release or "")
        if self.name != JAVA or number is None:
            return None
        wanted = release_number(number[0])
        known = [each for each in releases() if release_number(each) <= wanted]
        same_minor = [each for each in known if release_number(each)[:2] == wanted[:2]]
        if not same_minor and known and known[-1] != releases()[-1]:
            return None
        return spoken_by(known[-1]) if known else None

    def speaks_enough(self, api_key: int, taken: VersionRange) -> bool | None:
        """Whether it speaks a version that the target takes; None: not known."""
        spoken = self.spoken()
        if spoken is not None:
            mine = spoken.get(api_key)
            return mine is not None and mine.last >= taken.first
        told = f"{self.name} {self.release}" if self.name else ""
        if (found := _LIBRDKAFKA.search(told)) is not None:
            number = tuple(int(part) for part in found.groups())
            return True if number >= _LIBRDKAFKA_READY else None
        return None


def assess(tables: Tables, target: str) -> dict[str, Any]:
    """Who would break on the release `target` (``4.0``, ``3.9.1``), as a document for JSON.

    ``verdict`` is the worst of ``clients``, each with ``address``, ``client_id``,
    ``software_name``, ``software_version``, ``principal``, ``verdict``, ``connection_count``,
    ``request_count``, ``first_time``, ``last_time``, ``findings`` (a request with its API, version
    and count, what the target takes, what the broker offered, ``verdict`` and ``why``), ``formats``
    (what it writes) and ``upgrade`` (what to do). ``counts`` has the clients by verdict,
    ``internal`` lists brokers and controllers, ``unseen`` what TLS or losses hide. Raises
    ReadinessError for a release that is not known.
    """
    try:
        release = find_release(target)
    except ValueError as error:
        raise ReadinessError(str(error)) from error
    with tables.database() as database:
        _prepare(database, set(tables.names))
        clients = _clients(database, release)
        internal = _internal(database, release)
        unseen = _unseen(database)
    counts = {verdict: sum(each["verdict"] == verdict for each in clients) for verdict in VERDICTS}
    verdict = _worst(each["verdict"] for each in clients)
    if verdict == OK and unseen["tls_connection_count"]:
        verdict = UNKNOWN
    return {
        "format_version": FORMAT_VERSION,
        "target": target,
        "release": release,
        "verdict": verdict,
        "counts": counts,
        "clients": clients,
        "internal": internal,
        "unseen": unseen,
    }


def _worst(verdicts: Iterable[str]) -> str:
    return min(verdicts, key=VERDICTS.index, default=OK)


# Facts of the capture, as temporary tables


def _prepare(database: Database, names: set[str]) -> None:
    """who: connections with their owner; said: requests by owner, API and version."""
    replicas = [
        _replica_query(api, field, names)
        for api, field in (
            ("Fetch", "request.replica_id"),
            ("Fetch", "request.replica_state.replica_id"),
            ("ListOffsets", "request.replica_id"),
            ("OffsetForLeaderEpoch", "request.replica_id"),
        )
    ]
    verifying = (
        "select connection_id from api_add_partitions_to_txn "
        "where len(list_filter(request.transactions, lambda t: t.verify_only)) > 0"
        if "apis/AddPartitionsToTxn" in names
        else "select null::bigint connection_id where false"
    )
    internal_keys = ", ".join(map(str, sorted(INTER_BROKER_APIS)))
    database.run(
        f"""
        create temp table told as
        select connection_id, client_ip, broker_ip, broker_port, principal, handshake_seen,
            client_software_name software_name, client_software_version software_version,
            request_missing_byte_count = 0 as is_whole,
            case when len(client_ids) = 1 then client_ids[1] end as only_client_id
        from connections where is_kafka;

        create temp table asked as
        select exchange_id, connection_id, api_key, api_version, request_time,
            version_source in ('request_header', 'fallback_v0') or version_confidence = 1
                as is_sure,
            case when status = 'request_missing' then only_client_id else client_id end as client_id
        from exchanges join told using (connection_id)
        where api_key is not null;

        -- connections that show in their requests that a broker or a controller opened them
        create temp table marked as
        select distinct connection_id from (
            select connection_id from asked where api_key in ({internal_keys})
            union all select connection_id from asked
                where regexp_matches(client_id, '{INTERNAL_CLIENT_IDS}')
            union all select connection_id from asked where api_key not in {_HANDSHAKES}
                group by all having bool_and(api_key = {ApiKey.WRITE_TXN_MARKERS})
            union all select e.connection_id from record_batches b
                join exchanges e using (exchange_id)
                where b.source in ('replica_fetch', 'raft_fetch', 'snapshot')
            union all {verifying}
            {"".join(f"union all {each} " for each in replicas if each)}
        ) join told using (connection_id)
        where software_name is null or software_name = '{JAVA}';

        -- and those on which such a caller, that does nothing else, says no more than hello; a
        -- caller named by a number, as nodes are, is one with all its connections
        create temp table calls as
        select a.connection_id, t.client_ip, a.client_id,
            bool_and(a.api_key in {_HANDSHAKES}) is_hello,
            a.connection_id in (from marked) is_marked
        from asked a join told t using (connection_id)
        where a.client_id is not null and (t.software_name is null or t.software_name = '{JAVA}')
        group by all;
        create temp table inside as
        from marked union
        select connection_id from calls where (client_ip, client_id) in (
            select (client_ip, client_id) from calls group by client_ip, client_id
            having bool_or(is_marked)
                and (bool_and(is_marked or is_hello) or regexp_full_match(client_id, '\\d+'))
        );

        -- what started before the capture takes its names from connections of the same caller
        create temp table known as
        select client_ip, client_id,
            list(distinct software_name) filter (where software_name is not null) names,
            list(distinct software_version) filter (where software_version is not null) versions,
            list(distinct principal) filter (where principal is not null) principals
        from asked join told using (connection_id) group by all;

        create temp table who as
        select distinct t.connection_id, t.client_ip, a.client_id, t.broker_ip, t.broker_port,
            t.handshake_seen and t.is_whole as is_whole,
            case when t.software_name is null and not t.handshake_seen and len(names) = 1
                then names[1] else t.software_name end as software_name,
            case when t.software_name is null and not t.handshake_seen and len(names) = 1
                and len(versions) = 1 then versions[1] else t.software_version end
                as software_version,
            case when t.principal is null and not t.handshake_seen and len(principals) = 1
                then principals[1] else t.principal end as principal,
            t.connection_id in (from inside) as is_internal
        from told t join (select distinct connection_id, client_id from asked) a
            using (connection_id)
        left join known k on k.client_ip = t.client_ip
            and k.client_id is not distinct from a.client_id;

        create temp table said as
        select connection_id, client_id, api_key, api_version, count(*) request_count,
            min(request_time) first_time, max(request_time) last_time,
            arg_min(exchange_id, request_time) first_exchange_id
        from asked where is_sure and api_version is not null group by all;
        """
    )
    _prepare_offers(database, names)


def _replica_query(api: str, field: str, names: set[str]) -> str | None:
    if f"apis/{api}" not in names:
        return None
    view = {"Fetch": "api_fetch", "ListOffsets": "api_list_offsets"}.get(
        api, "api_offset_for_leader_epoch"
    )
    return f"select connection_id from {view} where {field} >= 0"


def _prepare_offers(database: Database, names: set[str]) -> None:
    """offered: what a broker answered on a connection; by_broker: the same for its address."""
    if "apis/ApiVersions" not in names:
        database.run(
            """
            create temp table offered (connection_id bigint, api_key smallint, first smallint,
                last smallint);
            """
        )
    else:
        database.run(
            """
            create temp table offered as
            select connection_id, k.api_key, min(k.min_version) first, max(k.max_version) last
            from (select connection_id, unnest(response.api_keys) k from api_api_versions
                where response.error_code = 0)
            group by all;
            """
        )
    database.run(
        f"""
        create temp table by_broker as
        select broker_ip, broker_port, api_key, min(first) first, list(distinct last) lasts
        from offered join told using (connection_id) group by all;

        create temp table negotiating as
        select distinct connection_id from asked where api_key = {ApiKey.API_VERSIONS};
        """
    )


# Clients


_CLIENT = ("client_ip", "client_id", "software_name", "software_version", "principal")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in _CLIENT)


def _clients(database: Database, release: str) -> list[dict[str, Any]]:
    columns = ", ".join(f"w.{name}" for name in _CLIENT)
    found = {
        _key(row): row
        for row in database.rows(
            f"""
            select {columns}, count(distinct s.connection_id) connection_count,
                sum(request_count)::bigint request_count, min(first_time) first_time,
                max(last_time) last_time,
                max(api_version) filter (where api_key = {ApiKey.API_VERSIONS}) asked_with
            from said s join who w on w.connection_id = s.connection_id
                and w.client_id is not distinct from s.client_id
            where not w.is_internal group by all
            """
        )
    }
    findings: dict[tuple[Any, ...], list[dict[str, Any]]] = {key: [] for key in found}
    for row in _suspects(database, release, "not is_internal"):
        finding = _judged(row, found[_key(row)], release)
        if finding is not None:
            findings[_key(row)].append(finding)
    formats = _formats(database, release)
    clients = []
    for key, row in found.items():
        merged = _merged(findings[key])
        clients.append(
            {
                "address": row["client_ip"],
                "client_id": row["client_id"],
                "software_name": row["software_name"],
                "software_version": row["software_version"],
                "principal": row["principal"],
                "verdict": _worst(each["verdict"] for each in merged),
                "connection_count": row["connection_count"],
                "request_count": row["request_count"],
                "first_time": _time(row["first_time"]),
                "last_time": _time(row["last_time"]),
                "findings": merged,
                "formats": formats.get(key, []),
                "upgrade": _upgrade(row, merged, release),
            }
        )
    return sorted(
        clients,
        key=lambda each: (
            VERDICTS.index(each["verdict"]),
            *(each[name] or "" for name in ("address", "client_id", "software_name", "principal")),
        ),
    )


def _time(value: Any) -> str | None:
    return None if value is None else value.isoformat().replace("+00:00", "Z")


def _suspects(database: Database, release: str, condition: str) -> list[dict[str, Any]]:
    """Requests that the release does not take, by caller and by what its brokers offered."""
    taken = spoken_by(release)
    values = ", ".join(f"({key}, {each.first})" for key, each in taken.items())
    columns = ", ".join(f"w.{name}" for name in _CLIENT)
    return database.rows(
        f"""
        with taken (api_key, first) as (values {values})
        select {columns}, s.api_key, s.api_version, w.is_whole,
            n.connection_id is not null as is_negotiating,
            coalesce(o.first, b.first) offered_first,
            case when o.last is null then b.lasts else [o.last] end offered_lasts,
            sum(s.request_count)::bigint request_count, min(s.first_time) first_time,
            arg_min(s.first_exchange_id, s.first_time) first_exchange_id
        from said s
        join who w on w.connection_id = s.connection_id
            and w.client_id is not distinct from s.client_id
        left join taken t on t.api_key = s.api_key
        left join negotiating n on n.connection_id = s.connection_id
        left join offered o on o.connection_id = s.connection_id and o.api_key = s.api_key
        left join by_broker b on b.broker_ip = w.broker_ip and b.broker_port = w.broker_port
            and b.api_key = s.api_key
        where {condition} and (t.api_key is null or s.api_version < t.first)
        group by all order by s.api_key, s.api_version
        """
    )


def _judged(row: dict[str, Any], client: dict[str, Any], release: str) -> dict[str, Any] | None:
    """A request that the release does not take as a finding, or None where it does no harm."""
    key, api_version = row["api_key"], row["api_version"]
    taken = spoken_by(release).get(key)
    if taken is None:
        if key in DISPENSABLE_APIS or key not in facts().names:
            return None  # it goes without; or no broker ever had it
        verdict, why = BREAKS, _missing_api(key, release)
    else:
        verdict, why = _judged_version(row, client, taken)
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
        "verdict": verdict,
        "why": why,
        "first_time": _time(row["first_time"]),
        "first_exchange_id": str(row["first_exchange_id"]),
    }


def _judged_version(
    row: dict[str, Any], client: dict[str, Any], taken: VersionRange
) -> tuple[str, str]:
    software = Software(row["software_name"], row["software_version"])
    told = f"{software.name} {software.release}"
    enough = software.speaks_enough(row["api_key"], taken)
    if enough is False:
        return BREAKS, f"{told} speaks none that the target takes"
    lasts = row["offered_lasts"]
    if row["is_whole"] and not row["is_negotiating"]:
        return BREAKS, "it never asks which versions a broker offers"
    if not lasts:
        if enough:
            return OK, f"{told} speaks newer ones"
        return UNKNOWN, "what its broker offered was not captured"
    if row["api_version"] not in lasts:
        return BREAKS, f"its broker offered up to {max(lasts)}"
    if enough:
        return OK, f"{told} speaks newer ones"
    return UNKNOWN, f"its broker offered no higher one{_java_hint(client, row['api_key'], taken)}"


def _java_hint(client: dict[str, Any], api_key: int, taken: VersionRange) -> str:
    """What Java clients that ask with the same ApiVersions version speak."""
    asked = client["asked_with"]
    if client["software_name"] is not None or asked is None:
        return ""
    same = [
        release
        for release in releases()
        if (spoken := spoken_by(release).get(ApiKey.API_VERSIONS)) is not None
        and spoken.last == asked
    ]
    if not same:
        return ""
    ready = [
        each
        for each in same
        if (spoken := spoken_by(each).get(api_key)) is not None and spoken.last >= taken.first
    ]
    span = f"{_minor(same[0])} to {_minor(same[-1])}"
    breaks = "would break" if not ready else "would not" if ready == same else "may break"
    return f"; it asks with ApiVersions {asked}: the Java clients {span} do that, and {breaks}"


def _minor(release: str) -> str:
    return ".".join(release.split(".")[:2])


def _missing_api(key: int, release: str) -> str:
    having = [each for each in releases() if key in spoken_by(each)]
    if release_number(having[0]) > release_number(release):
        return f"brokers have it from {_minor(having[0])} on"
    return f"{_minor(having[-1])} was the last to have it"


def _merged(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each API and version, the worst verdict first."""
    merged: dict[tuple[int, int], dict[str, Any]] = {}
    for each in sorted(findings, key=lambda each: VERDICTS.index(each["verdict"])):
        place = (each["api_key"], each["api_version"])
        if place not in merged:
            merged[place] = each
            continue
        kept = merged[place]
        kept["request_count"] += each["request_count"]
        if each["first_time"] < kept["first_time"]:
            kept["first_time"] = each["first_time"]
            kept["first_exchange_id"] = each["first_exchange_id"]
    return [merged[place] for place in sorted(merged)]


def _formats(database: Database, release: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """The message formats that each client writes, and whether the release takes them."""
    produce = spoken_by(release).get(ApiKey.PRODUCE)
    oldest = 2 if produce is None or produce.first >= MAGIC_2_PRODUCE else 0
    columns = ", ".join(f"w.{name}" for name in _CLIENT)
    formats: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in database.rows(
        f"""
        select {columns}, b.magic, count(*) batch_count, sum(b.record_count)::bigint record_count
        from record_batches b join asked a using (exchange_id)
        join who w on w.connection_id = a.connection_id
            and w.client_id is not distinct from a.client_id
        where b.source = 'produce' and b.magic is not null
        group by all order by b.magic
        """
    ):
        formats.setdefault(_key(row), []).append(
            {
                "magic": row["magic"],
                "batch_count": row["batch_count"],
                "record_count": row["record_count"],
                "is_taken": row["magic"] >= oldest,
            }
        )
    return formats


def _upgrade(row: dict[str, Any], findings: list[dict[str, Any]], release: str) -> str | None:
    """What to do about the findings, in a sentence."""
    if not findings:
        return None
    old = [each for each in findings if each["taken"] is not None]
    missing = [each["api_name"] for each in findings if each["taken"] is None]
    words = []
    if old:
        ready = _ready_java(release)
        since = f" (kafka-clients {_minor(ready)} or newer)" if ready else ""
        least = ", ".join(
            f"{name} {first}"
            for name, first in dict.fromkeys((each["api_name"], each["taken"][0]) for each in old)
        )
        name = row["software_name"] or "the client library"
        words.append(
            f"upgrade {name}, or lift the protocol version it is configured for, until it speaks "
            f"{least}{since}"
        )
    if missing:
        words.append(f"do without {', '.join(dict.fromkeys(missing))} on {_minor(release)}")
    return "; ".join(words)


def _ready_java(release: str) -> str | None:
    """The first release whose Java clients speak what this one takes, in every API they have."""
    taken = spoken_by(release)
    for each in releases():
        spoken = spoken_by(each)
        if all(
            versions.last >= taken[key].first
            for key, versions in spoken.items()
            if key in taken and key not in INTER_BROKER_APIS and key != ApiKey.WRITE_TXN_MARKERS
        ):
            return each
    return None


# What does not count, and what cannot be seen


def _internal(database: Database, release: str) -> list[dict[str, Any]]:
    """Brokers and controllers by address and client id, with what the release does not take."""
    found = {
        (row["client_ip"], row["client_id"]): {
            "address": row["client_ip"],
            "client_id": row["client_id"],
            "connection_count": row["connection_count"],
            "request_count": row["request_count"],
            "not_taken": [],
        }
        for row in database.rows(
            """
            select w.client_ip, w.client_id, count(distinct s.connection_id) connection_count,
                sum(request_count)::bigint request_count
            from said s join who w on w.connection_id = s.connection_id
                and w.client_id is not distinct from s.client_id
            where w.is_internal group by all order by all
            """
        )
    }
    for row in _suspects(database, release, "is_internal"):
        found[row["client_ip"], row["client_id"]]["not_taken"].append(
            {
                "api_key": row["api_key"],
                "api_name": facts().names.get(row["api_key"], str(row["api_key"])),
                "api_version": row["api_version"],
                "request_count": row["request_count"],
            }
        )
    return list(found.values())


def _unseen(database: Database) -> dict[str, Any]:
    """Traffic that tells nothing: TLS without its secrets, requests that were not captured."""
    (row,) = database.rows(
        """
        select
            (select count(*) from connections where is_tls and not is_kafka) tls_connection_count,
            (select coalesce(list(distinct client_ip order by client_ip), []) from connections
                where is_tls and not is_kafka) tls_addresses,
            (select count(*) from asked where not is_sure or api_version is null)
                undetermined_exchange_count
        """
    )
    return row

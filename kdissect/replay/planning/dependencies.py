"""Finds the resources that a request reads and changes at the broker.

The plan uses them to send a request after those on which its effect depends.

A *resource* is a tuple whose first item says what it is: ``("log", topic, partition)``,
``("start", topic, partition)`` for the start of that log,
``("topic", name)``, ``("group", id)``, ``("commits", group id)``, ``("txn", transactional id)``,
``("pid", producer id)``, and single ones such as ``("acls",)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from kdissect.codec.message import Message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batch_headers import headers
from kdissect.replay.fields import FieldKind, iter_fields
from kdissect.replay.model import Exchange, Mode, Resource, ResourceAccess, WorkloadFacts
from kdissect.replay.workload.messages import (
    GROUP_KEY,
    NOT_MADE_YET,
    SHARE_APIS,
    TOPIC_RESOURCE,
    entries,
    request_of,
    response_of,
)


class ResourceAccesses:
    """Finds the topics, groups and other resources that each request reads or writes.

    Call `of` with the requests in order of their times: earlier requests decide which partitions
    belong to a transaction, and whether there are ACLs.
    """

    def __init__(self, facts: WorkloadFacts) -> None:
        self.names = {
            UUID(topic_id): topic.name
            for topic in facts.topics.values()
            for topic_id in topic.topic_ids
        }
        self.in_transaction: dict[str, set[Resource]] = {}
        self.has_acls = False
        self._in_session: dict[int, set[str]] = {}  # fetch session -> topics
        # Equal requests share one tuple: a Fetch may name a hundred partitions.
        self._shared: dict[tuple[ResourceAccess, ...], tuple[ResourceAccess, ...]] = {}

    def of(self, exchange: Exchange) -> tuple[ResourceAccess, ...]:
        """The resources of a request, each once (the stronger mode wins)."""
        request = request_of(exchange)
        if request is None:
            return ()
        found: dict[Resource, Mode] = {}
        for resource, mode in self._touches(exchange, request):
            if found.get(resource) is not Mode.WRITE:
                found[resource] = mode
        accesses = tuple(found.items())
        return self._shared.setdefault(accesses, accesses)

    def topic_name(self, name: str, topic_id: UUID | None) -> str:
        """The topic's name, by its id if `name` is empty; an id without known name as text."""
        if name or topic_id is None:
            return name
        return self.names.get(topic_id, str(topic_id))

    def _touches(self, exchange: Exchange, request: Message) -> Iterable[ResourceAccess]:
        key = exchange.api_key
        topics, logs, groups, transactions = self._named(request)
        for name in topics:
            yield ("topic", name), Mode.READ
        if self.has_acls:
            yield ("acls",), Mode.READ
        if key == ApiKey.PRODUCE:
            yield from self._produce(request, logs)
        elif key == ApiKey.FETCH:
            for log in self._fetched(exchange, logs):
                yield log, Mode.READ_NO_BLOCK
                # Its answer has the log start offset, and it never waits for DeleteRecords.
                yield ("start", *log[1:]), Mode.READ
            for name in self._session_topics(exchange, request, topics):
                yield ("topic", name), Mode.READ
        elif key in (
            ApiKey.LIST_OFFSETS,
            ApiKey.OFFSET_FOR_LEADER_EPOCH,
            ApiKey.DESCRIBE_PRODUCERS,
        ):
            for log in logs:
                yield log, Mode.READ
        elif key == ApiKey.DELETE_RECORDS:
            for log in logs:
                yield log, Mode.WRITE
                yield ("start", *log[1:]), Mode.WRITE
        elif key == ApiKey.METADATA:
            yield from self._metadata(exchange, topics)
        elif key in _TOPIC_WRITERS:
            for name in topics:
                yield ("topic", name), Mode.WRITE
            yield ("topics",), Mode.COMMUTING_WRITE
        elif key in _GROUP_APIS:
            yield from self._group(exchange, request, groups)
        elif key in _TXN_APIS:
            yield from self._transaction(exchange, request, logs, groups, transactions)
        else:
            yield from self._cluster(key, request)

    def _named(self, request: Message) -> tuple[list[str], list[Resource], list[str], list[str]]:
        """Topics, logs, groups and transactional ids that a request names."""
        topics: dict[str, None] = {}
        logs: dict[Resource, None] = {}
        groups: dict[str, None] = {}
        transactions: dict[str, None] = {}
        for field in iter_fields(request):
            kind, values, topic = field.kind, field.values, field.around.topic
            if kind is FieldKind.TOPIC:
                topics |= dict.fromkeys(name for name in values if name)
            elif kind is FieldKind.TOPIC_ID and not topic:
                names = (self.topic_name("", each) for each in values)
                topics |= dict.fromkeys(name for name in names if name)
            elif kind is FieldKind.PARTITION:
                name = self.topic_name(topic, field.around.topic_id)
                logs |= dict.fromkeys(("log", name, each) for each in values)
            elif kind is FieldKind.GROUP:
                groups |= dict.fromkeys(values)
            elif kind is FieldKind.TRANSACTIONAL_ID:
                transactions |= dict.fromkeys(values)
        return list(topics), list(logs), list(groups), list(transactions)

    def _produce(self, request: Message, logs: list[Resource]) -> Iterable[ResourceAccess]:
        for log in logs:
            yield log, Mode.WRITE
            # Its answer has the log start offset, too; nothing waits for it because of that.
            yield ("start", *log[1:]), Mode.READ_NO_BLOCK
        transactional_id = request.body.get("transactional_id")
        if transactional_id is not None:
            yield ("txn", transactional_id), Mode.READ
            self.in_transaction.setdefault(transactional_id, set()).update(logs)
        for topic in entries(request.body.get("topic_data")):
            for partition in entries(topic["partition_data"]):
                for header in headers(partition["records"] or b""):
                    if header.producer_id >= 0:
                        yield ("pid", header.producer_id), Mode.READ

    def _fetched(self, exchange: Exchange, logs: list[Resource]) -> list[Resource]:
        """Logs that a Fetch asks for by name, and those its answer has something of."""
        response = response_of(exchange)
        if response is None:
            return logs
        answered = [("log", name, number) for name, number, _ in self.fetched_sets(response)]
        return list(dict.fromkeys([*logs, *answered]))

    def _session_topics(
        self, exchange: Exchange, request: Message, topics: list[str]
    ) -> Iterable[str]:
        """Topics of the session of a Fetch, which names only those that change (KIP-227)."""
        response = response_of(exchange)
        session = 0 if response is None else response.body.get("session_id", 0)
        is_new = request.body.get("session_id", 0) != session
        names = set() if is_new else self._in_session.get(session, set())
        if session and not names.issuperset(topics):
            self._in_session[session] = names.union(topics)
        return names

    def fetched_sets(self, response: Message) -> list[tuple[str, int, bytes]]:
        """(topic, partition, record data) of a Fetch response."""
        return [
            (
                self.topic_name(topic.get("topic") or "", topic.get("topic_id")),
                partition["partition_index"],
                partition["records"] or b"",
            )
            for topic in entries(response.body.get("responses"))
            for partition in entries(topic["partitions"])
        ]

    def _metadata(self, exchange: Exchange, topics: list[str]) -> Iterable[ResourceAccess]:
        if not topics:
            yield ("topics",), Mode.READ
        response = response_of(exchange)
        for entry in entries(response.body["topics"]) if response is not None else []:
            if entry["error_code"] in NOT_MADE_YET and entry.get("name") in topics:
                yield ("topic", entry["name"]), Mode.WRITE
                yield ("topics",), Mode.COMMUTING_WRITE

    def _group(
        self, exchange: Exchange, request: Message, groups: list[str]
    ) -> Iterable[ResourceAccess]:
        key = exchange.api_key
        if key == ApiKey.LIST_GROUPS:
            yield ("groups",), Mode.READ
            return
        if key == ApiKey.DESCRIBE_GROUPS:
            groups = entries(request.body["groups"])
        for group in groups:
            if key == ApiKey.OFFSET_COMMIT:
                yield ("group", group), Mode.READ
                yield ("commits", group), Mode.WRITE
                yield ("groups",), Mode.COMMUTING_WRITE
            elif key == ApiKey.OFFSET_FETCH:
                yield ("group", group), Mode.READ
                yield ("commits", group), Mode.READ
            elif key in _GROUP_READERS:
                yield ("group", group), Mode.READ
            elif key in SHARE_APIS:
                yield ("group", group), Mode.READ
                yield ("share", group), Mode.WRITE
                for log in self._named(request)[1]:
                    yield log, Mode.READ_NO_BLOCK
            else:
                yield ("group", group), Mode.WRITE
                yield ("groups",), Mode.COMMUTING_WRITE
                if request.body.get("subscribed_topic_regex"):  # the broker looks for topics
                    yield ("topics",), Mode.READ
                if key in (ApiKey.DELETE_GROUPS, ApiKey.OFFSET_DELETE):
                    yield ("commits", group), Mode.WRITE
                if key in _SHARE_OFFSETS:
                    yield ("share", group), Mode.WRITE

    def _transaction(
        self,
        exchange: Exchange,
        request: Message,
        logs: list[Resource],
        groups: list[str],
        transactions: list[str],
    ) -> Iterable[ResourceAccess]:
        key = exchange.api_key
        if key in (ApiKey.DESCRIBE_TRANSACTIONS, ApiKey.LIST_TRANSACTIONS):
            yield ("txns",), Mode.READ
            for name in transactions:
                yield ("txn", name), Mode.READ
            return
        for name in transactions:
            yield ("txn", name), Mode.WRITE
            yield ("txns",), Mode.COMMUTING_WRITE
            held = self.in_transaction.setdefault(name, set())
            if key == ApiKey.ADD_PARTITIONS_TO_TXN:
                held.update(logs)
            elif key == ApiKey.TXN_OFFSET_COMMIT:
                held.update(("commits", group) for group in groups)
            elif key in (ApiKey.END_TXN, ApiKey.INIT_PRODUCER_ID):
                for resource in held:
                    yield resource, Mode.WRITE
                held.clear()
        if key == ApiKey.TXN_OFFSET_COMMIT:
            for group in groups:
                yield ("group", group), Mode.READ
                yield ("commits", group), Mode.WRITE
                yield ("groups",), Mode.COMMUTING_WRITE
        if key in (ApiKey.INIT_PRODUCER_ID, ApiKey.END_TXN):
            response = response_of(exchange)
            producer_id = -1 if response is None else response.body.get("producer_id", -1)
            if producer_id >= 0:
                yield ("pid", producer_id), Mode.WRITE

    def _cluster(self, key: int, request: Message) -> Iterable[ResourceAccess]:
        for name, readers, writers in _SINGLE:
            if key in readers:
                yield (name,), Mode.READ
            elif key in writers:
                yield (name,), Mode.WRITE
                self.has_acls = self.has_acls or name == "acls"
        if key in (ApiKey.DESCRIBE_CONFIGS, ApiKey.ALTER_CONFIGS, ApiKey.INCREMENTAL_ALTER_CONFIGS):
            mode = Mode.READ if key == ApiKey.DESCRIBE_CONFIGS else Mode.WRITE
            for resource in entries(request.body["resources"]):
                name = resource["resource_name"]
                yield ("config", resource["resource_type"], name), mode
                if resource["resource_type"] == TOPIC_RESOURCE:
                    yield ("topic", name), mode
        elif key == ApiKey.FIND_COORDINATOR:
            keys = request.body.get("coordinator_keys") or [request.body.get("key")]
            is_group = request.body.get("key_type", GROUP_KEY) == GROUP_KEY
            for name in keys:
                yield ("group" if is_group else "txn", name), Mode.READ_NO_BLOCK


_TOPIC_WRITERS = frozenset(
    {
        ApiKey.CREATE_TOPICS, ApiKey.DELETE_TOPICS, ApiKey.CREATE_PARTITIONS, ApiKey.ELECT_LEADERS,
        ApiKey.ALTER_PARTITION_REASSIGNMENTS,
    }
)  # fmt: skip
_GROUP_READERS = frozenset(
    {
        ApiKey.HEARTBEAT, ApiKey.DESCRIBE_GROUPS, ApiKey.CONSUMER_GROUP_DESCRIBE,
        ApiKey.SHARE_GROUP_DESCRIBE, ApiKey.STREAMS_GROUP_DESCRIBE,
        ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS,
    }
)  # fmt: skip
_SHARE_OFFSETS = frozenset({ApiKey.ALTER_SHARE_GROUP_OFFSETS, ApiKey.DELETE_SHARE_GROUP_OFFSETS})
_GROUP_APIS = (
    frozenset(
        {
            ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP, ApiKey.LEAVE_GROUP, ApiKey.OFFSET_COMMIT,
            ApiKey.OFFSET_FETCH, ApiKey.LIST_GROUPS, ApiKey.DELETE_GROUPS, ApiKey.OFFSET_DELETE,
            ApiKey.CONSUMER_GROUP_HEARTBEAT, ApiKey.SHARE_GROUP_HEARTBEAT,
            ApiKey.STREAMS_GROUP_HEARTBEAT, ApiKey.SHARE_FETCH, ApiKey.SHARE_ACKNOWLEDGE,
        }
    )
    | _GROUP_READERS
    | _SHARE_OFFSETS
)  # fmt: skip
_TXN_APIS = frozenset(
    {
        ApiKey.INIT_PRODUCER_ID, ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.ADD_OFFSETS_TO_TXN,
        ApiKey.END_TXN, ApiKey.TXN_OFFSET_COMMIT, ApiKey.DESCRIBE_TRANSACTIONS,
        ApiKey.LIST_TRANSACTIONS,
    }
)  # fmt: skip
# resource, who reads it, who changes it
_SINGLE: tuple[tuple[str, frozenset[int], frozenset[int]], ...] = (
    (
        "acls",
        frozenset({ApiKey.DESCRIBE_ACLS}),
        frozenset({ApiKey.CREATE_ACLS, ApiKey.DELETE_ACLS}),
    ),
    (
        "tokens",
        frozenset({ApiKey.DESCRIBE_DELEGATION_TOKEN}),
        frozenset(
            {
                ApiKey.CREATE_DELEGATION_TOKEN,
                ApiKey.RENEW_DELEGATION_TOKEN,
                ApiKey.EXPIRE_DELEGATION_TOKEN,
            }
        ),
    ),
    ("quotas", frozenset({ApiKey.DESCRIBE_CLIENT_QUOTAS}), frozenset({ApiKey.ALTER_CLIENT_QUOTAS})),
    (
        "scram",
        frozenset({ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS}),
        frozenset({ApiKey.ALTER_USER_SCRAM_CREDENTIALS}),
    ),
    ("logdirs", frozenset({ApiKey.DESCRIBE_LOG_DIRS}), frozenset({ApiKey.ALTER_REPLICA_LOG_DIRS})),
    (
        "cluster",
        frozenset({ApiKey.DESCRIBE_CLUSTER, ApiKey.API_VERSIONS}),
        frozenset({ApiKey.UNREGISTER_BROKER, ApiKey.UPDATE_FEATURES}),
    ),
    (
        "config-names",
        frozenset({ApiKey.LIST_CONFIG_RESOURCES, ApiKey.GET_TELEMETRY_SUBSCRIPTIONS}),
        frozenset({ApiKey.ALTER_CONFIGS, ApiKey.INCREMENTAL_ALTER_CONFIGS}),
    ),
    (
        "topics",
        frozenset({ApiKey.LIST_PARTITION_REASSIGNMENTS, ApiKey.DESCRIBE_LOG_DIRS}),
        frozenset(),
    ),
)
BLOCKING_GROUP_APIS = frozenset({ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP})

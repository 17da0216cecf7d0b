"""The class of a request, and the resources of a broker that it reads and changes.

The plan sends a request after those on which its effect depends; a run also asks by resources which
node a request goes to, and what it writes to.

A *resource* is a tuple whose first item says what it is: ``("log", topic, partition)``,
``("start", topic, partition)`` for the start of that log, ``("topic", name)``, ``("group", id)``,
``("commits", group)`` and ``("share", group)`` for the offsets of a group, ``("transactional-id",
id)``, ``("pid", producer id)``, ``("config", type, name)``, and single ones such as ``("acls",)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kdissect.codec.message import Message
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay import model
from kdissect.replay.batches import headers
from kdissect.replay.fields import iter_fields
from kdissect.replay.model import Exchange, Mode, Resource, ResourceAccess, Workload
from kdissect.replay.workload import messages
from kdissect.replay.workload.fetch_sessions import FetchSessions
from kdissect.replay.workload.messages import GROUP_KEY, Body, entries, response_body

Names = tuple[str | int, ...]  # the rest of a resource

# By class of API: what requests read and change, beside the topics that they name, which they read.
# An API that is not here is ADMIN.
# log, start: of each partition; topic, group, commits, share, transactional-id: of each that the
# request names.
# peek: a read that no write waits for; add: a write that commutes with other such writes.
_ACCESSES: dict[str, dict[str, str]] = {
    model.READ: {
        "log peek, start read": "Fetch",  # has the log start, which DeleteRecords moves
        "log read": "ListOffsets OffsetForLeaderEpoch DescribeProducers",
        "": "Metadata DescribeTopicPartitions FindCoordinator DescribeQuorum DescribeConfigs",
        "cluster read": "ApiVersions DescribeCluster",
        "config-names read": "ListConfigResources GetTelemetrySubscriptions",
        "logdirs read, topics read": "DescribeLogDirs",
        "topics read": "ListPartitionReassignments",
        "group read, commits read": "OffsetFetch",
        "group read": (
            "DescribeGroups ConsumerGroupDescribe ShareGroupDescribe StreamsGroupDescribe "
            "DescribeShareGroupOffsets"
        ),
        "groups read": "ListGroups",
        "transactional-id read, transactions read": "DescribeTransactions",
        "transactions read": "ListTransactions",
        "acls read": "DescribeAcls",
        "tokens read": "DescribeDelegationToken",
        "quotas read": "DescribeClientQuotas",
        "scram read": "DescribeUserScramCredentials",
    },
    model.PRODUCE: {"log write, start peek, transactional-id read": "Produce"},
    model.GROUPS: {
        "group write, groups add": (
            "JoinGroup SyncGroup LeaveGroup "
            "ConsumerGroupHeartbeat ShareGroupHeartbeat StreamsGroupHeartbeat"
        ),
        "group read": "Heartbeat",
        "group read, commits write, groups add": "OffsetCommit",
        "group read, share write, log peek": "ShareFetch ShareAcknowledge",
    },
    model.TRANSACTIONS: {
        "transactional-id write": "InitProducerId AddPartitionsToTxn AddOffsetsToTxn EndTxn",
        "transactional-id write, group read, commits write, groups add": "TxnOffsetCommit",
    },
    model.ADMIN: {
        "log write, start write": "DeleteRecords",
        "topic write, topics add": (
            "CreateTopics DeleteTopics CreatePartitions ElectLeaders AlterPartitionReassignments"
        ),
        "logdirs write": "AlterReplicaLogDirs",
        "group write, groups add, commits write": "DeleteGroups OffsetDelete",
        "group write, groups add, share write": "AlterShareGroupOffsets DeleteShareGroupOffsets",
        "acls write": "CreateAcls DeleteAcls",
        "tokens write": "CreateDelegationToken RenewDelegationToken ExpireDelegationToken",
        "quotas write": "AlterClientQuotas",
        "scram write": "AlterUserScramCredentials",
        "cluster write": "UnregisterBroker UpdateFeatures",
        "config-names write": "AlterConfigs IncrementalAlterConfigs",
    },
}
_NAMED_AS = {"start": "log", "commits": "group", "share": "group"}
_NAMED_KINDS = "topic", "log", "group", "transactional-id"
_CONFIG_APIS = messages.apis("DescribeConfigs AlterConfigs IncrementalAlterConfigs")
_ROWS = [
    (catalog.api(name).key, class_name, accesses)
    for class_name, rows in _ACCESSES.items()
    for accesses, names in rows.items()
    for name in names.split()
]
_CLASSES: dict[int, str] = {key: class_name for key, class_name, _ in _ROWS}
_RULES: dict[int, list[tuple[str, Mode]]] = {
    key: [(what, Mode(mode)) for what, mode in map(str.split, filter(None, text.split(", ")))]
    for key, _, text in _ROWS
}


def class_of(exchange: Exchange) -> str:
    """The class of a request, which `--allow` names."""
    if exchange.api_key == ApiKey.INIT_PRODUCER_ID:
        if messages.request_body(exchange).get("transactional_id", "") is None:
            return model.PRODUCE  # the id of an idempotent producer
    elif exchange.api_key == ApiKey.PRODUCE:
        if messages.request_body(exchange).get("transactional_id") is not None:
            return model.TRANSACTIONS
    return _CLASSES.get(exchange.api_key, model.ADMIN)


class ResourceAccesses:
    """Finds the resources of each request.

    Call `of` with the requests in order of their times: earlier requests decide which partitions
    belong to a transaction, and whether there are ACLs.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload, facts = workload, workload.facts
        self._names = messages.captured_topics(facts)
        self._sessions = FetchSessions(facts.fetch_sessions)
        self._in_transaction: dict[str, set[Resource]] = {}
        self._shown = {topic.name for topic in facts.topics.values() if topic.first_time_ns >= 0}
        # topics that a Metadata request makes, and that no response has shown yet
        self._awaited: set[str] = set()
        self._has_acls = False
        # Equal requests share one tuple: a Fetch may name a hundred partitions.
        self._shared: dict[tuple[ResourceAccess, ...], tuple[ResourceAccess, ...]] = {}

    def of(self, exchange: Exchange) -> tuple[ResourceAccess, ...]:
        """The resources of a request, each once (the stronger mode wins)."""
        request = messages.request_of(exchange)
        if request is None:
            return ()
        found: dict[Resource, Mode] = {}
        for resource, mode in self._accesses(exchange, request):
            if found.get(resource) is not Mode.WRITE:
                found[resource] = mode
        accesses = tuple(found.items())
        return self._shared.setdefault(accesses, accesses)

    def _accesses(self, exchange: Exchange, request: Message) -> Iterator[ResourceAccess]:
        named = self._named(exchange, request)
        for topic in named["topic"]:
            yield ("topic", *topic), Mode.READ
        if self._has_acls:
            yield ("acls",), Mode.READ
        for what, mode in _RULES.get(exchange.api_key, ()):
            for name in named.get(_NAMED_AS.get(what, what), [()]):
                yield (what, *name), mode
            self._has_acls |= what == "acls" and mode is Mode.WRITE
        yield from self._more(exchange, request.body, named)

    def _named(self, exchange: Exchange, request: Message) -> dict[str, list[Names]]:
        """The rest of the tuple of each topic, log, group and so on that a request names."""
        found: dict[str, dict[Names, None]] = {kind: {} for kind in _NAMED_KINDS}
        for field in iter_fields(request):
            kind, values, around = field.kind, field.values, field.around
            if kind == "topic-id" and not around.topic:
                kind, values = "topic", [self._names.by_id.get(each) for each in values]
            if kind == "partition":
                name = self._names.name(around.topic, around.topic_id)
                found["log"] |= dict.fromkeys((name, each) for each in values)
            elif kind in found:
                found[kind] |= dict.fromkeys((each,) for each in values if each)
        if exchange.api_key == ApiKey.FETCH:
            response = response_body(exchange)
            found["log"] |= dict.fromkeys(log for log, _ in self._names.logs(response))
            broker = self._workload.connections[exchange.connection].broker
            for key, _ in self._sessions.after(broker, request.body, response):
                name, topic_id = (key, None) if isinstance(key, str) else ("", key)
                found["topic"][(self._names.name(name, topic_id),)] = None
        return {kind: list(names) for kind, names in found.items()}

    def _more(
        self, exchange: Exchange, body: Body, named: Mapping[str, list[Names]]
    ) -> Iterator[ResourceAccess]:
        """Accesses that depend on more than the names in a request."""
        key = exchange.api_key
        if key == ApiKey.PRODUCE:
            for _, _, partition in messages.partitions(body):
                for header in headers(partition["records"] or b""):
                    if header.producer_id >= 0:
                        yield ("pid", header.producer_id), Mode.READ
        elif key == ApiKey.METADATA:
            if not named["topic"]:
                yield ("topics",), Mode.READ
            makes = body.get("allow_auto_topic_creation", True)
            for entry in entries(response_body(exchange).get("topics")):
                name, is_missing = entry.get("name"), entry["error_code"] in messages.NOT_MADE_YET
                if (name,) not in named["topic"] or name not in self._shown:
                    continue
                if is_missing and makes:
                    self._awaited.add(name)
                # who asks after the first answer that shows the topic must not be asked before it
                if name in self._awaited:
                    yield from self._topic_made(name)
                if not is_missing:
                    self._awaited.discard(name)
        elif key == ApiKey.STREAMS_GROUP_HEARTBEAT and body["topology"] is not None:
            # the broker makes its internal topics (KIP-1071)
            for part in entries(body["topology"]["subtopologies"]):
                for topic in (*part["repartition_source_topics"], *part["state_changelog_topics"]):
                    yield from self._topic_made(topic["name"])
        elif key == ApiKey.CONSUMER_GROUP_HEARTBEAT and body.get("subscribed_topic_regex"):
            yield ("topics",), Mode.READ  # the broker looks for them
        elif key in _CONFIG_APIS:
            mode = Mode.READ if key == ApiKey.DESCRIBE_CONFIGS else Mode.WRITE
            for resource in entries(body["resources"]):
                yield ("config", resource["resource_type"], resource["resource_name"]), mode
                if resource["resource_type"] == messages.TOPIC_RESOURCE:
                    yield ("topic", resource["resource_name"]), mode
        elif key == ApiKey.FIND_COORDINATOR:
            what = "group" if body.get("key_type", GROUP_KEY) == GROUP_KEY else "transactional-id"
            for name in body.get("coordinator_keys") or [body.get("key")]:
                yield (what, name), Mode.PEEK
        elif key in (ApiKey.INIT_PRODUCER_ID, ApiKey.END_TXN):
            if (producer_id := response_body(exchange).get("producer_id", -1)) >= 0:
                yield ("pid", producer_id), Mode.WRITE
        if key not in (ApiKey.DESCRIBE_TRANSACTIONS, ApiKey.LIST_TRANSACTIONS):
            for name in named["transactional-id"]:
                yield from self._transaction(key, str(name[0]), named)

    def _topic_made(self, name: str) -> Iterator[ResourceAccess]:
        yield ("topic", name), Mode.WRITE
        yield ("topics",), Mode.COMMUTING_WRITE

    def _transaction(
        self, key: int, name: str, named: Mapping[str, list[Names]]
    ) -> Iterator[ResourceAccess]:
        """What a transaction has written becomes visible when it ends."""
        if key != ApiKey.PRODUCE:
            yield ("transactions",), Mode.COMMUTING_WRITE
        held = self._in_transaction.setdefault(name, set())
        if key in (ApiKey.PRODUCE, ApiKey.ADD_PARTITIONS_TO_TXN):
            held.update(("log", *log) for log in named["log"])
        elif key == ApiKey.TXN_OFFSET_COMMIT:
            held.update(("commits", *group) for group in named["group"])
        elif key in (ApiKey.END_TXN, ApiKey.INIT_PRODUCER_ID):
            yield from ((resource, Mode.WRITE) for resource in held)
            held.clear()

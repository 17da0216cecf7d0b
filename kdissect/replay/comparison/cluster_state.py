"""Finds answers that contradict what the run has shown of brokers, topics and transactions.

- A node that answers the run is in Metadata and DescribeCluster, at one address and in one rack.
- Leaders, replicas and controllers are brokers of the same answer; a leader is no offline replica.
- Each requested key has one coordinator, which is a broker of Metadata, at its address.
- Metadata and DescribeTopicPartitions list each requested topic once, with its partitions from 0
  on.
- A topic that the target had, or that the run made a bounded time before, is in Metadata, and never
  without a partition.
- A controller quorum has one log, and its leader is a voter at the end of it. An observer is no
  voter. Each voter is among the nodes.
- The log dirs of a broker have each partition once. The only broker has those that the captured one
  had.
- A transaction is Ongoing only until its end, or until its timeout, in partitions of the run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.comparison.timing import WRITE_S
from kdissect.replay.model import Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.target_facts import ZERO_UUID
from kdissect.replay.workload.messages import decoded, entries, response_of

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
Body = dict[str, Any]

_BOUND_NS = int(WRITE_S * 1e9)
_EXPIRY_NS = 15_000_000_000  # coordinators look for expired transactions every ten seconds
_ENDED = frozenset({"CompleteCommit", "CompleteAbort", "Empty", "Dead"})
_ENDING = frozenset({"PrepareCommit", "PrepareAbort"})
_APIS = frozenset(
    {
        ApiKey.METADATA, ApiKey.DESCRIBE_CLUSTER, ApiKey.FIND_COORDINATOR, ApiKey.CREATE_TOPICS,
        ApiKey.DELETE_TOPICS, ApiKey.INIT_PRODUCER_ID, ApiKey.END_TXN, ApiKey.DESCRIBE_TRANSACTIONS,
        ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.ADD_OFFSETS_TO_TXN, ApiKey.TXN_OFFSET_COMMIT,
        ApiKey.PRODUCE, ApiKey.CREATE_PARTITIONS, ApiKey.DESCRIBE_TOPIC_PARTITIONS,
        ApiKey.DESCRIBE_LOG_DIRS, ApiKey.DESCRIBE_QUORUM,
        ApiKey.ALTER_REPLICA_LOG_DIRS,
    }
)  # fmt: skip
_OFFSETS_TOPIC = "__consumer_offsets"  # brokers add it for TxnOffsetCommit
_METADATA_TOPIC = "__cluster_metadata"
_QUORUM_NODES = 2  # DescribeQuorum has the voters' addresses from this version on (KIP-853)
_UNCOMMITTED = 1_000  # records of the metadata log that a controller is writing
_NOT_EMPTY = "not empty"
_NO_TOPIC = frozenset({None, "", ZERO_UUID})
_Decoded = tuple[Outcome, Body, Body]  # with the request and the answer


class ClusterState:
    """Facts of a run about brokers, topics and transactions."""

    def __init__(self, ids: IdMap) -> None:
        self._ids = ids
        self._by_api: dict[int, list[_Decoded]] = defaultdict(list)
        self._active: dict[int, list[int]] = defaultdict(list)  # node -> when it answered
        self._cluster_id = ""
        self._brokers: dict[int, Body] = defaultdict(dict)  # node -> host, port and rack

    def collect(self, outcome: Outcome) -> None:
        if outcome.answer is None or outcome.sent is None:
            return
        if outcome.node_id is not None:
            self._active[outcome.node_id].append(outcome.answered_ns)
        api_key = outcome.step.exchange.api_key
        if api_key in _APIS:
            request = decoded(outcome.sent, "request", api_key, outcome.api_version)
            answer = decoded(outcome.answer, "response", api_key, outcome.api_version)
            if request is None or answer is None:
                return
            if api_key != ApiKey.PRODUCE or _transactional_ids(request.body):
                self._by_api[api_key].append((outcome, request.body, answer.body))

    def _learn_cluster(self) -> None:
        """Learn the cluster id, and the address and rack of each node, that most answers of
        Metadata and DescribeCluster give."""
        counts: dict[tuple[int, str], Counter[Any]] = defaultdict(Counter)
        ids: Counter[str] = Counter()
        for node, (host, port) in self._ids.target.nodes.items():
            counts[node, "host"][host] += 1
            counts[node, "port"][port] += 1
        for api_key in (ApiKey.METADATA, ApiKey.DESCRIBE_CLUSTER):
            for _, _, answer in self._by_api[api_key]:
                ids[answer.get("cluster_id") or ""] += 1
                for broker in entries(answer.get("brokers")):
                    node = broker["node_id"] if "node_id" in broker else broker["broker_id"]
                    for name in ("host", "port", "rack"):
                        if name in broker:
                            counts[node, name][broker[name]] += 1
        most = ids.most_common(1)[0][0] if ids else ""
        self._cluster_id = self._ids.target.cluster_id or most
        for (node, name), values in counts.items():
            usual = [value for value, _ in values.most_common() if value != ""]
            self._brokers[node][name] = usual[0] if usual else _NOT_EMPTY

    def _is_up(self, node: int, outcome: Outcome) -> bool:
        """Return whether a node answered the run shortly before and after this exchange."""
        if self._ids.target.has_one_node:
            return node in self._ids.target.nodes
        times = self._active.get(node, ())
        begin, end = outcome.sent_ns, outcome.answered_ns
        return any(begin - _BOUND_NS < at < begin for at in times) and any(
            end < at < end + _BOUND_NS for at in times
        )

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        self._learn_cluster()
        made, constants = self._topics_before() | self._topics_made(), self._constants()
        for outcome, request, answer in self._by_api[ApiKey.METADATA]:
            brokers = self._check_brokers(outcome, answer, "node_id", add)
            _check_placement(outcome, answer, brokers, add)
            _check_topics(outcome, request, answer, add)
            self._check_constants(outcome, answer, constants, add)
            _check_topics_made(outcome, request, answer, made, add)
        for outcome, request, answer in self._by_api[ApiKey.DESCRIBE_TOPIC_PARTITIONS]:
            _check_placement(outcome, answer, set(self._brokers), add)
            if request["cursor"] is None and answer["next_cursor"] is None:  # all partitions
                _check_topics(outcome, request, answer, add)
                self._check_constants(outcome, answer, constants, add)
                _check_topics_made(outcome, request, answer, made, add)
        for outcome, _, answer in self._by_api[ApiKey.DESCRIBE_CLUSTER]:
            if not answer["error_code"] and answer.get("endpoint_type", 1) == 1:
                self._check_brokers(outcome, answer, "broker_id", add)
        for outcome, request, answer in self._by_api[ApiKey.FIND_COORDINATOR]:
            self._check_coordinators(outcome, request, answer, add)
        for outcome, _, answer in self._by_api[ApiKey.DESCRIBE_LOG_DIRS]:
            self._check_log_dirs(outcome, answer, add)
        if self._ids.target.has_one_node:
            self._check_moves(add)
        for outcome, _, answer in self._by_api[ApiKey.DESCRIBE_QUORUM]:
            if not answer["error_code"]:
                _check_quorum(outcome, answer, add)
        self._check_transactions(add)

    def _check_log_dirs(self, outcome: Outcome, answer: Body, add: Add) -> None:
        ids, response = self._ids, response_of(outcome.step.exchange)
        captured = {} if response is None else response.body
        known_codes = {log_dir["error_code"] for log_dir in entries(captured.get("results"))}
        is_any_cordoned = any(each.get("is_cordoned") for each in entries(captured.get("results")))
        is_alone = ids.target.has_one_node and len(ids.captured_nodes) <= 1
        for at, log_dir in enumerate(entries(answer["results"])):
            path, total = f"results[{at}]", log_dir.get("total_bytes", -1)
            if log_dir["error_code"] and log_dir["error_code"] not in known_codes:
                add(outcome, f"{path}.error_code", 0, log_dir["error_code"], "a log dir has failed")
            if log_dir.get("is_cordoned") and not is_any_cordoned:
                note = "no captured log dir is"
                add(outcome, f"{path}.is_cordoned", "false", "true", note)
            if log_dir.get("usable_bytes", -1) == 0 < total:
                add(outcome, f"{path}.usable_bytes", "some", 0, "the disk is full")
            if 0 <= total < log_dir.get("usable_bytes", -1):
                note, usable = "more than the dir has", log_dir["usable_bytes"]
                add(outcome, f"{path}.usable_bytes", f"at most {total}", usable, note)
        listed = Counter(name for name, _ in _logs_in(answer))
        for name, lag in _logs_in(answer):
            text = f"{name[0]} partition {name[1]}"
            if listed[name] > 1:
                add(outcome, "results", "each partition once", text, "it is listed twice")
            if lag and is_alone:
                path = "results[].topics[].partitions[].offset_lag"
                add(outcome, path, 0, lag, "a leader has no lag")
        wanted = {(ids.topic(topic), number) for (topic, number), _ in _logs_in(captured)}
        wanted &= ids.target.leaders.keys()
        if not is_alone or outcome.step.is_racing:
            return
        for topic, number in sorted(wanted - listed.keys()):
            note = "the captured broker had it in a log dir"
            add(outcome, "results", f"{topic} partition {number}", "not listed", note)
        topics = {topic for topic, _ in wanted}
        for topic, number in sorted(listed.keys() - wanted):
            if topic in topics:
                note = "the captured broker had no such partition"
                add(outcome, "results", f"{topic}", f"partition {number}", note)

    def _check_moves(self, add: Add) -> None:
        """The only broker moves no replica to a log dir that it does not have."""
        dirs = {
            log_dir["log_dir"]
            for _, _, answer in self._by_api[ApiKey.DESCRIBE_LOG_DIRS]
            for log_dir in entries(answer["results"])
        }
        for outcome, request, answer in self._by_api[ApiKey.ALTER_REPLICA_LOG_DIRS]:
            wanted = {each["path"] for each in entries(request["dirs"])}
            codes = [
                partition["error_code"]
                for topic in entries(answer["results"])
                for partition in entries(topic["partitions"])
            ]
            if dirs and dirs.isdisjoint(wanted) and 0 in codes:
                path, note = "results[].partitions[].error_code", "DescribeLogDirs has no such dir"
                add(outcome, path, "an error", 0, note)

    def _check_brokers(self, outcome: Outcome, answer: Body, id_name: str, add: Add) -> set[int]:
        known_id, cluster_id = self._cluster_id, answer.get("cluster_id")
        if cluster_id and known_id and cluster_id != known_id:
            add(outcome, "cluster_id", known_id, cluster_id, "other answers have another one")
        listed = set()
        for at, broker in enumerate(entries(answer["brokers"])):
            node, path = broker[id_name], f"brokers[{at}]"
            if node in listed:
                add(outcome, f"{path}.{id_name}", "each broker once", node, "it is listed twice")
            if broker.get("is_fenced") and self._is_up(node, outcome):
                add(outcome, f"{path}.is_fenced", "false", "true", "it answers the run")
            listed.add(node)
            for name, wanted in self._brokers[node].items():
                if name in broker and broker[name] != wanted:
                    note = "other answers say otherwise" if broker[name] else "clients need it"
                    add(outcome, f"{path}.{name}", wanted, broker[name], note)
        for node in list(self._brokers):
            if node not in listed and self._is_up(node, outcome):
                add(outcome, "brokers", f"broker {node}", "not listed", "it answers the run")
        return listed

    def _check_coordinators(self, outcome: Outcome, request: Body, answer: Body, add: Add) -> None:
        coordinators = [("", answer)]
        if "coordinators" in answer:  # KIP-699: from v4 on, one for each key
            wanted = Counter(entries(request["coordinator_keys"]))
            found = Counter(each["key"] for each in entries(answer["coordinators"]))
            for key in sorted((wanted - found) | (found - wanted)):
                note = "one for each requested key"
                add(outcome, "coordinators", f"{key} {wanted[key]} times", found[key], note)
            coordinators = [
                (f"coordinators[{at}].", coordinator)
                for at, coordinator in enumerate(entries(answer["coordinators"]))
            ]
        for path, coordinator in coordinators:
            if coordinator["error_code"]:
                continue
            broker = self._brokers.get(coordinator["node_id"])
            if broker is None:
                note = "Metadata has no such broker"
                add(outcome, f"{path}node_id", "a broker", coordinator["node_id"], note)
                continue
            for name in ("host", "port"):
                if coordinator[name] != broker[name] != _NOT_EMPTY:
                    note = f"the address of broker {coordinator['node_id']} in Metadata"
                    add(outcome, f"{path}{name}", broker[name], coordinator[name], note)

    def _topics_made(self) -> dict[str, tuple[int, int]]:
        """Topics that CreateTopics of the run made, and nothing of it deletes: when that was
        answered, and with how many partitions (-1 unknown)."""
        deleted, grown = self._topics_deleted(), self._topics_grown()
        if None in deleted:
            return {}  # by id
        made: dict[str, tuple[int, int]] = {}
        for outcome, request, answer in self._by_api[ApiKey.CREATE_TOPICS]:
            for topic in entries(answer["topics"]):
                name = topic["name"]
                if topic["error_code"] or request.get("validate_only") or name in deleted:
                    continue
                count = -1 if name in grown else topic.get("num_partitions", -1)
                made.setdefault(name, (outcome.answered_ns, count))
        return made

    def _topics_before(self) -> dict[str, tuple[int, int]]:
        """As `_topics_made`, of topics that the target had before the first request."""
        deleted = self._topics_deleted()
        begin_ns = -_BOUND_NS if self._ids.target.has_one_node else 0
        first = () if None in deleted else self._ids.target.first_topics - deleted
        return dict.fromkeys(first, (begin_ns, -1))

    def _topics_deleted(self) -> set[str | None]:
        """Names in requests of the run; None for a topic that a request names by its id."""
        return {
            name
            for _, request, _ in self._by_api[ApiKey.DELETE_TOPICS]
            for name in [*entries(request.get("topic_names")),
                         *(each["name"] for each in entries(request.get("topics")))]
        }  # fmt: skip

    def _topics_grown(self) -> set[str]:
        return {
            topic["name"]
            for _, request, _ in self._by_api[ApiKey.CREATE_PARTITIONS]
            for topic in entries(request["topics"])
        }

    def _constants(self) -> dict[str, tuple[bool, int]]:
        """Topics that the run does not change: whether most answers call it internal, and how many
        partitions most of them list."""
        changed = {*self._topics_deleted(), *self._topics_grown(), *self._topics_made()}
        counts: dict[str, Counter[tuple[bool, int]]] = defaultdict(Counter)
        for _, _, answer in self._by_api[ApiKey.METADATA]:
            for topic in entries(answer["topics"]):
                if not topic["error_code"] and topic.get("name"):
                    counts[topic["name"]][_constants_of(topic)] += 1
        return {
            name: each.most_common(1)[0][0]
            for name, each in counts.items()
            if name not in changed and None not in changed
        }

    def _check_constants(
        self, outcome: Outcome, answer: Body, constants: dict[str, tuple[bool, int]], add: Add
    ) -> None:
        deleted = self._topics_deleted()
        for at, topic in enumerate(entries(answer["topics"])):
            usual = constants.get(topic.get("name") or "")
            if deleted.isdisjoint({topic.get("name"), None}):
                self._check_id(outcome, f"topics[{at}].topic_id", topic, add)
            if usual is None or topic["error_code"] or not topic["partitions"]:
                continue
            names = "is_internal", "partitions"
            for name, wanted, found in zip(names, usual, _constants_of(topic), strict=True):
                if wanted != found:
                    note = "other answers have another value"
                    add(outcome, f"topics[{at}].{name}", wanted, found, note)

    def _check_id(self, outcome: Outcome, path: str, topic: Body, add: Add) -> None:
        """A topic that the run does not delete keeps its id; with an error it may have none."""
        known_id, topic_id = self._ids.target.topic_ids.get(topic["name"]), topic.get("topic_id")
        if None not in (known_id, topic_id) and topic_id not in (known_id, ZERO_UUID):
            add(outcome, path, known_id, topic_id, "the topic has had another id")

    # -- transactions ---------------------------------------------------------------------------

    def _transaction_logs(self) -> dict[str, set[tuple[str, int]]]:
        """Partitions that requests of the run name for each transactional id."""
        logs: dict[str, set[tuple[str, int]]] = defaultdict(set)
        for _, request, _ in self._by_api[ApiKey.ADD_PARTITIONS_TO_TXN]:
            several = [(each["transactional_id"], each["topics"])
                       for each in entries(request.get("transactions"))]  # fmt: skip
            name = request.get("v3_and_below_transactional_id")
            for owner, topics in [*several, (name, request.get("v3_and_below_topics"))]:
                for topic in entries(topics):
                    logs[owner].update((topic["name"], each) for each in topic["partitions"])
        for _, request, _ in self._by_api[ApiKey.PRODUCE]:
            for topic in entries(request["topic_data"]):
                name = self._ids.target.topic_name(topic)
                numbers = [each["index"] for each in entries(topic["partition_data"])]
                logs[request["transactional_id"]].update((name, each) for each in numbers)
        return logs

    def _check_transactions(self, add: Add) -> None:
        timeouts: dict[str, int] = {}
        for _, request, _ in self._by_api[ApiKey.INIT_PRODUCER_ID]:
            if request["transactional_id"]:
                timeouts[request["transactional_id"]] = (
                    request["transaction_timeout_ms"] * 1_000_000
                )
        used: dict[str, list[tuple[int, int, bool]]] = defaultdict(list)  # sent, answered, ends
        for api_key in _USING:
            for outcome, request, answer in self._by_api[api_key]:
                ends = api_key == ApiKey.END_TXN and not answer["error_code"]
                for name in _transactional_ids(request):
                    used[name].append((outcome.sent_ns, outcome.answered_ns, ends))
        logs = self._transaction_logs()
        for outcome, _, answer in self._by_api[ApiKey.DESCRIBE_TRANSACTIONS]:
            for at, described in enumerate(entries(answer["transaction_states"])):
                _check_logs(outcome, f"transaction_states[{at}]", described, logs, add)
                if described["error_code"] or described["transaction_state"] in _ENDED:
                    continue
                events = sorted(used[described["transactional_id"]])
                before = [event for event in events if event[0] <= outcome.answered_ns]
                if not before:
                    continue
                _, answered_ns, has_ended = before[-1]
                limit_ns = _BOUND_NS if has_ended else timeouts.get(described["transactional_id"])
                is_wrong = has_ended and described["transaction_state"] not in _ENDING
                if limit_ns is not None and not has_ended:
                    limit_ns += _EXPIRY_NS
                if is_wrong or (limit_ns is not None and outcome.sent_ns > answered_ns + limit_ns):
                    path = f"transaction_states[{at}].transaction_state"
                    note = "EndTxn was answered" if has_ended else "its timeout is over"
                    add(outcome, path, "an ended transaction", described["transaction_state"], note)


def _check_quorum(outcome: Outcome, answer: Body, add: Add) -> None:
    nodes = [each["node_id"] for each in entries(answer.get("nodes"))]
    for at, node in enumerate(entries(answer.get("nodes"))):
        listeners = [listener["name"] for listener in node["listeners"]]
        if len(set(listeners)) < len(listeners):
            add(outcome, f"nodes[{at}].listeners", "each once", listeners, "one is listed twice")
        for listener in node["listeners"] or [{"host": "", "port": 0}]:
            if not listener["host"] or not listener["port"]:
                note = "voters connect to each other there"
                add(outcome, f"nodes[{at}].listeners", "an address", "none", note)
    if len(set(nodes)) < len(nodes):
        add(outcome, "nodes", "each node once", nodes, "a node is listed twice")
    logs = [(topic["topic_name"], each) for topic in entries(answer["topics"])
            for each in entries(topic["partitions"])]  # fmt: skip
    if [name for name, _ in logs] != [_METADATA_TOPIC]:
        names = ", ".join(name for name, _ in logs)
        add(outcome, "topics", _METADATA_TOPIC, names, "a quorum has one log")
    for _, log in logs:
        path = "topics[].partitions[]"
        ends = {each["replica_id"]: each["log_end_offset"] for each in log["current_voters"]}
        leader = log["leader_id"]
        if log["error_code"] or leader < 0:
            continue
        if not log["leader_epoch"]:
            add(outcome, f"{path}.leader_epoch", "at least 1", 0, "the first election has epoch 1")
        if leader not in ends or len(ends) < len(log["current_voters"]):
            note = "the leader is a voter, and each voter is listed once"
            add(outcome, f"{path}.current_voters", f"leader {leader}", [*ends], note)
        elif not nodes and outcome.api_version >= _QUORUM_NODES:
            add(outcome, "nodes", [*ends], "none", "the addresses of the voters")
        elif nodes and not ends.keys() <= set(nodes):
            add(outcome, f"{path}.current_voters", f"of {nodes}", [*ends], "a voter is no node")
        elif not 0 <= log["high_watermark"] <= ends[leader] == max(ends.values()):
            note = "the leader has all records"
            add(outcome, f"{path}.high_watermark", f"at most {ends[leader]}",
                log["high_watermark"], note)  # fmt: skip
        elif len(ends) == 1 and ends[leader] > log["high_watermark"] + _UNCOMMITTED:
            note, most = "the only voter commits alone", log["high_watermark"] + _UNCOMMITTED
            here = f"{path}.current_voters[].log_end_offset"
            add(outcome, here, f"at most {most}", ends[leader], note)
        else:
            _check_observers(outcome, f"{path}.observers", log["observers"], ends, add)


def _check_observers(
    outcome: Outcome, path: str, observers: list[Body], voters: dict[int, int], add: Add
) -> None:
    """Each is listed once, is no voter, and has no record that the voters lack."""
    nodes = [each["replica_id"] for each in observers]
    if len({*nodes, *voters}) < len(nodes) + len(voters):
        add(outcome, path, "other nodes than voters, each once", nodes, "a node is listed twice")
    last = max((each["log_end_offset"] for each in observers), default=-1)
    if last > max(voters.values()):
        note = "the leader has all records"
        add(outcome, path, f"at most {max(voters.values())}", last, note)


def _logs_in(answer: Body) -> Iterator[tuple[tuple[str, int], int]]:
    """((topic, partition), offset lag) of the logs in log dirs, without those that are being moved
    there."""
    for each in entries(answer.get("results")):
        for topic in entries(each["topics"]):
            for partition in entries(topic["partitions"]):
                if not partition["is_future_key"]:
                    yield (topic["name"], partition["partition_index"]), partition["offset_lag"]


_USING = (
    ApiKey.END_TXN, ApiKey.INIT_PRODUCER_ID, ApiKey.ADD_PARTITIONS_TO_TXN,
    ApiKey.ADD_OFFSETS_TO_TXN, ApiKey.TXN_OFFSET_COMMIT, ApiKey.PRODUCE,
)  # fmt: skip


def _check_logs(
    outcome: Outcome, path: str, described: Body, logs: dict[str, set[tuple[str, int]]], add: Add
) -> None:
    """An ongoing transaction has partitions, each once, which requests of the run have named."""
    used = logs.get(described["transactional_id"])
    if described["error_code"] or described["transaction_state"] != "Ongoing" or used is None:
        return
    listed = [
        (topic["topic"], number)
        for topic in entries(described["topics"])
        for number in entries(topic["partitions"])
    ]
    if not listed:
        add(outcome, f"{path}.topics", "a partition", "none", "the transaction is ongoing")
    for (topic, number), count in Counter(listed).items():
        text = f"{topic} partition {number}"
        if count > 1:
            add(outcome, f"{path}.topics", "each partition once", text, "it is listed twice")
        if topic != _OFFSETS_TOPIC and (topic, number) not in used:
            note = "no request of this transactional id has named it"
            add(outcome, f"{path}.topics", "partitions of the transaction", text, note)


def _transactional_ids(request: Body) -> list[str]:
    """Those of a request; AddPartitionsToTxn has several, or one."""
    several = [each["transactional_id"] for each in entries(request.get("transactions"))]
    single = request.get("transactional_id") or request.get("v3_and_below_transactional_id")
    return several or ([single] if single else [])


def _check_placement(outcome: Outcome, answer: Body, brokers: set[int], add: Add) -> None:
    """Of each partition: its leader is a broker and a replica in sync, replicas are listed once."""
    controller = answer.get("controller_id", -1)
    if controller >= 0 and controller not in brokers:
        add(outcome, "controller_id", "a broker", controller, "it is not in the list of brokers")
    for i, topic in enumerate(entries(answer["topics"])):
        for j, partition in enumerate(entries(topic["partitions"])):
            path = f"topics[{i}].partitions[{j}]"
            leader, code = partition["leader_id"], partition["error_code"]
            if code == ErrorCode.UNKNOWN_SERVER_ERROR:
                add(outcome, f"{path}.error_code", 0, code, "the broker failed")
            if partition["error_code"] or leader < 0:
                continue
            if leader not in brokers:
                note = "it is not in the list of brokers"
                add(outcome, f"{path}.leader_id", "a broker", leader, note)
            _check_replicas(outcome, path, partition, add)


def _check_replicas(outcome: Outcome, path: str, partition: Body, add: Add) -> None:
    leader, replicas = partition["leader_id"], partition["replica_nodes"]
    for name in ("replica_nodes", "isr_nodes"):
        nodes = partition[name]
        if leader not in nodes:
            add(outcome, f"{path}.{name}", f"leader {leader}", nodes, "the leader is not in it")
        if len(set(nodes)) < len(nodes):
            add(outcome, f"{path}.{name}", "each broker once", nodes, "a broker is in it twice")
        if not set(nodes) <= set(replicas):
            add(outcome, f"{path}.{name}", f"of {replicas}", nodes, "a broker has no replica")
    offline = partition.get("offline_replicas", [])
    if leader in offline:
        add(outcome, f"{path}.offline_replicas", f"not {leader}", offline, "the leader is in it")
    elif not set(offline) <= set(replicas):
        note = "a broker has no replica"
        add(outcome, f"{path}.offline_replicas", f"of {replicas}", offline, note)


def _constants_of(topic: Body) -> tuple[bool, int]:
    return topic.get("is_internal", False), len(topic["partitions"])


def _check_topics(outcome: Outcome, request: Body, answer: Body, add: Add) -> None:
    """A response lists each requested topic once, and its partitions from 0 on."""
    topics = entries(answer["topics"])
    ids = [{topic.get("name"), topic.get("topic_id")} - _NO_TOPIC for topic in topics]
    wanted = [each.get("name") or each.get("topic_id") for each in entries(request["topics"])]
    is_all = not wanted and (request["topics"] is None or outcome.api_version == 0)
    for at, topic in enumerate(topics):
        path = f"topics[{at}]"
        name = topic.get("name") or topic.get("topic_id")
        if not is_all and ids[at].isdisjoint(wanted):
            add(outcome, f"{path}.name", "a requested topic", name, "the request does not name it")
        if any(ids[at] & other for other in ids[:at]):
            add(outcome, f"{path}.name", "each topic once", name, "it is listed twice")
        if topic["error_code"] == ErrorCode.UNKNOWN_SERVER_ERROR:
            add(outcome, f"{path}.error_code", 0, topic["error_code"], "the broker failed")
        numbers = sorted(each["partition_index"] for each in entries(topic["partitions"]))
        if not numbers and not topic["error_code"]:
            add(outcome, f"{path}.partitions", "at least one", "none", "each topic has partitions")
        if numbers != list(range(len(numbers))):
            note = "a topic has partitions from 0 on, each once"
            add(outcome, f"{path}.partitions", "from 0 on", numbers, note)
    for name in wanted:
        if not any(name in each for each in ids):
            add(outcome, "topics", f"topic {name}", "not listed", "the request names it")


def _check_topics_made(
    outcome: Outcome, request: Body, answer: Body, made: dict[str, tuple[int, int]], add: Add
) -> None:
    names = request["topics"]
    asked: Sequence[Any] | None = None if names is None else [each.get("name") for each in names]
    listed = {topic.get("name"): (at, topic) for at, topic in enumerate(entries(answer["topics"]))}
    for name, (made_ns, count) in made.items():
        at, topic = listed.get(name, (-1, None))
        is_due = outcome.sent_ns >= made_ns + _BOUND_NS and (asked is None or name in asked)
        if topic is None:
            if is_due:
                add(outcome, "topics", f"topic {name}", "not listed", "it was made before")
        elif topic["error_code"] == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            if is_due:
                path = f"topics[{at}].error_code"
                add(outcome, path, 0, topic["error_code"], "it was made before")
        elif not topic["error_code"] and 0 <= count != len(topic["partitions"]) > 0:
            said = f"{len(topic['partitions'])} partitions"
            path = f"topics[{at}].partitions"
            add(outcome, path, f"{count} partitions", said, "as CreateTopics has answered")

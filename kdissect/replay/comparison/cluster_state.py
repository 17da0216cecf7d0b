"""Finds answers that contradict what the run has shown of brokers, topics and transactions.

- A partition's leader is a broker of the same answer, and one of its replicas in sync.
- Each requested key has one coordinator, and each requested topic is listed once, with its
  partitions from 0 on.
- A topic that the target had, or that the run made a bounded time before, is in Metadata, and never
  without a partition.
- A transaction is Ongoing only until its end, or until its timeout.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import ErrorCode
from kdissect.replay.model import Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.translation.target_facts import ZERO_UUID
from kdissect.replay.workload.messages import decoded, entries

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
Body = dict[str, Any]

_BOUND_NS = 5_000_000_000  # until a write is seen on every broker
_EXPIRY_NS = 15_000_000_000  # coordinators look for expired transactions every ten seconds
_ENDED = frozenset({"CompleteCommit", "CompleteAbort", "Empty", "Dead"})
_ENDING = frozenset({"PrepareCommit", "PrepareAbort"})
_APIS = frozenset(
    {
        ApiKey.METADATA, ApiKey.FIND_COORDINATOR, ApiKey.CREATE_TOPICS, ApiKey.DELETE_TOPICS,
        ApiKey.INIT_PRODUCER_ID, ApiKey.END_TXN, ApiKey.DESCRIBE_TRANSACTIONS,
        ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.ADD_OFFSETS_TO_TXN, ApiKey.TXN_OFFSET_COMMIT,
        ApiKey.PRODUCE, ApiKey.CREATE_PARTITIONS, ApiKey.DESCRIBE_TOPIC_PARTITIONS,
    }
)  # fmt: skip
_NO_TOPIC = frozenset({None, "", ZERO_UUID})
_Decoded = tuple[Outcome, Body, Body]  # with the request and the answer


class ClusterState:
    """Facts of a run about brokers, topics and transactions."""

    def __init__(self, ids: IdMap) -> None:
        self._ids = ids
        self._by_api: dict[int, list[_Decoded]] = defaultdict(list)

    def collect(self, outcome: Outcome) -> None:
        if outcome.answer is None or outcome.sent is None:
            return
        api_key = outcome.step.exchange.api_key
        if api_key in _APIS:
            request = decoded(outcome.sent, "request", api_key, outcome.api_version)
            answer = decoded(outcome.answer, "response", api_key, outcome.api_version)
            if request is None or answer is None:
                return
            if api_key != ApiKey.PRODUCE or _transactional_ids(request.body):
                self._by_api[api_key].append((outcome, request.body, answer.body))

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        made = self._topics_before() | self._topics_made()
        for outcome, request, answer in self._by_api[ApiKey.METADATA]:
            brokers = {each["node_id"] for each in entries(answer["brokers"])}
            _check_leaders(outcome, answer, brokers, add)
            _check_topics(outcome, request, answer, add)
            _check_topics_made(outcome, request, answer, made, add)
        for outcome, request, answer in self._by_api[ApiKey.DESCRIBE_TOPIC_PARTITIONS]:
            _check_leaders(outcome, answer, set(self._ids.target.nodes), add)
            if request["cursor"] is None and answer["next_cursor"] is None:  # all partitions
                _check_topics(outcome, request, answer, add)
                _check_topics_made(outcome, request, answer, made, add)
        for outcome, request, answer in self._by_api[ApiKey.FIND_COORDINATOR]:
            _check_coordinators(outcome, request, answer, add)
        self._check_transactions(add)

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

    # -- transactions ---------------------------------------------------------------------------

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
        for outcome, _, answer in self._by_api[ApiKey.DESCRIBE_TRANSACTIONS]:
            for at, described in enumerate(entries(answer["transaction_states"])):
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


_USING = (
    ApiKey.END_TXN, ApiKey.INIT_PRODUCER_ID, ApiKey.ADD_PARTITIONS_TO_TXN,
    ApiKey.ADD_OFFSETS_TO_TXN, ApiKey.TXN_OFFSET_COMMIT, ApiKey.PRODUCE,
)  # fmt: skip


def _transactional_ids(request: Body) -> list[str]:
    """Those of a request; AddPartitionsToTxn has several, or one."""
    several = [each["transactional_id"] for each in entries(request.get("transactions"))]
    single = request.get("transactional_id") or request.get("v3_and_below_transactional_id")
    return several or ([single] if single else [])


def _check_leaders(outcome: Outcome, answer: Body, brokers: set[int], add: Add) -> None:
    """The leader of each partition is a broker, and a replica in sync."""
    for i, topic in enumerate(entries(answer["topics"])):
        for j, partition in enumerate(entries(topic["partitions"])):
            path, leader = f"topics[{i}].partitions[{j}]", partition["leader_id"]
            if partition["error_code"] or leader < 0:
                continue
            if leader not in brokers:
                note = "it is not in the list of brokers"
                add(outcome, f"{path}.leader_id", "a broker", leader, note)
            for name in ("replica_nodes", "isr_nodes"):
                if leader not in partition[name]:
                    nodes, note = partition[name], "the leader is not in it"
                    add(outcome, f"{path}.{name}", f"leader {leader}", nodes, note)


def _check_coordinators(outcome: Outcome, request: Body, answer: Body, add: Add) -> None:
    """KIP-699: from v4 on, an answer has one coordinator for each requested key."""
    if "coordinators" not in answer:
        return
    wanted = Counter(entries(request["coordinator_keys"]))
    found = Counter(each["key"] for each in entries(answer["coordinators"]))
    for key in sorted((wanted - found) | (found - wanted)):
        note = "one for each requested key"
        add(outcome, "coordinators", f"{key} {wanted[key]} times", found[key], note)


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

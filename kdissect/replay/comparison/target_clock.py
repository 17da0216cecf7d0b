"""Finds times in answers that do not fit the target's clock.

Brokers take some times from their clock while they handle a request of the run: those of appends,
markers, starts of transactions, new and expired delegation tokens, and the last contact of a
quorum's leader. DescribeProducers has the time of a producer's last marker. Each shows how far the
target's clock is from that of the run. Most of them agree; clocks of several brokers may be one
second apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kdissect.codec.message import Message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batch_headers import headers, max_timestamp
from kdissect.replay.model import Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import decoded, entries, error_codes

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
Body = dict[str, Any]
_SLACK_MS = 1_000
_CLOCKS_MAX = 64  # that are tried
_MS = 1_000_000  # in nanoseconds
_USES = frozenset(
    {
        ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.ADD_OFFSETS_TO_TXN, ApiKey.TXN_OFFSET_COMMIT,
        ApiKey.PRODUCE,
    }
)  # fmt: skip
_ENDS = frozenset({ApiKey.END_TXN, ApiKey.INIT_PRODUCER_ID})
_TIMED = frozenset(
    {
        ApiKey.PRODUCE, ApiKey.CREATE_DELEGATION_TOKEN, ApiKey.DESCRIBE_QUORUM, ApiKey.FETCH,
        ApiKey.DESCRIBE_TRANSACTIONS, ApiKey.DESCRIBE_PRODUCERS, ApiKey.EXPIRE_DELEGATION_TOKEN,
    }
)  # fmt: skip


class _BrokerTime(NamedTuple):
    """A time of the target's clock, taken between two moments of the run."""

    outcome: Outcome
    path: str
    time_ms: int
    begin_ns: int
    end_ns: int

    @property
    def least_ms(self) -> int:
        """The least distance of the clocks that it shows."""
        return self.time_ms - self.end_ns // _MS

    @property
    def most_ms(self) -> int:
        return self.time_ms - self.begin_ns // _MS

    def distance_ms(self, clock_ms: int) -> int:
        return max(self.least_ms - clock_ms, clock_ms - self.most_ms, 0)


class TargetClock:
    """Times of a run's answers."""

    def __init__(self, ids: IdMap) -> None:
        self._stated: list[_BrokerTime] = []
        # transactional id -> when requests used it, from the first one of its last transaction on
        self._used: dict[str, list[Outcome]] = defaultdict(list)
        self._has_ended: set[str] = set()
        self._unknown: set[str] = set()  # transactional ids of requests without an answer
        self._producers: dict[int, int] = {}  # producer id -> when a request named it first

    def collect(self, outcome: Outcome) -> None:
        api_key = outcome.step.exchange.api_key
        if outcome.sent is None or api_key not in _TIMED | _USES | _ENDS:
            return
        request = decoded(outcome.sent, "request", api_key, outcome.api_version)
        answer = decoded(outcome.answer or b"", "response", api_key, outcome.api_version)
        is_done = answer is not None and not any(error_codes(answer.body))
        if request is not None and (is_done or answer is None):
            self._use(outcome, request.body)
        if answer is not None and api_key in _TIMED:
            self._stated += self._times(outcome, request, answer.body)

    def _use(self, outcome: Outcome, request: Body) -> None:
        """Note the transactions of a request that the target took, or may have taken."""
        api_key, several = outcome.step.exchange.api_key, entries(request.get("transactions"))
        name = request.get("transactional_id") or request.get("v3_and_below_transactional_id")
        for named in [{"transactional_id": name, **request}, *several]:
            owner = named["transactional_id"]
            if not owner:
                continue
            if api_key in _ENDS:
                self._has_ended.add(owner)
            elif owner in self._has_ended:
                self._has_ended.discard(owner)
                self._used[owner] = []
            if outcome.answer is None:
                self._unknown.add(owner)
            elif api_key in _USES:
                self._used[owner].append(outcome)
            producer_id = named.get("producer_id", named.get("v3_and_below_producer_id", -1))
            self._producers.setdefault(producer_id, outcome.sent_ns)

    def _times(
        self, outcome: Outcome, request: Message | None, answer: Body
    ) -> Iterator[_BrokerTime]:
        """The times in an answer."""
        moments = outcome.sent_ns, outcome.answered_ns
        api_key = outcome.step.exchange.api_key
        if api_key == ApiKey.CREATE_DELEGATION_TOKEN and not answer["error_code"]:
            yield _BrokerTime(outcome, "issue_timestamp_ms", answer["issue_timestamp_ms"], *moments)
        elif api_key == ApiKey.EXPIRE_DELEGATION_TOKEN:
            is_now = request is not None and request.body["expiry_time_period_ms"] < 0
            if is_now and not answer["error_code"]:
                time = answer["expiry_timestamp_ms"]
                yield _BrokerTime(outcome, "expiry_timestamp_ms", time, *moments)
        elif api_key == ApiKey.DESCRIBE_TRANSACTIONS:
            for at, each in enumerate(entries(answer["transaction_states"])):
                owner, time = each["transactional_id"], each["transaction_start_time_ms"]
                used = self._used[owner]
                if used and time > 0 and owner not in self._unknown:
                    path = f"transaction_states[{at}].transaction_start_time_ms"
                    last_ns = max(use.answered_ns for use in used)
                    yield _BrokerTime(outcome, path, time, used[0].sent_ns, last_ns)
        elif api_key == ApiKey.PRODUCE:
            for i, topic in enumerate(entries(answer["responses"])):
                for j, partition in enumerate(entries(topic["partition_responses"])):
                    time = partition.get("log_append_time_ms", -1)
                    if time >= 0:
                        path = f"responses[{i}].partition_responses[{j}].log_append_time_ms"
                        yield _BrokerTime(outcome, path, time, *moments)
        elif api_key == ApiKey.DESCRIBE_QUORUM:
            yield from self._contacts(outcome, answer)
        elif api_key == ApiKey.FETCH:
            yield from self._markers(outcome, answer)
        elif api_key == ApiKey.DESCRIBE_PRODUCERS:
            yield from self._last_markers(outcome, answer)

    def _contacts(self, outcome: Outcome, answer: Body) -> Iterator[_BrokerTime]:
        """The leader of a quorum has contact with itself at any time."""
        for topic in entries(answer["topics"]):
            for log in entries(topic["partitions"]):
                for voter in entries(log["current_voters"]):
                    for name in ("last_caught_up_timestamp", "last_fetch_timestamp"):
                        time = voter.get(name, -1)
                        if voter["replica_id"] == log["leader_id"] and time >= 0:
                            path = f"topics[].partitions[].current_voters[].{name}"
                            moments = outcome.sent_ns, outcome.answered_ns
                            yield _BrokerTime(outcome, path, time, *moments)

    def _markers(self, outcome: Outcome, answer: Body) -> Iterator[_BrokerTime]:
        for i, topic in enumerate(entries(answer["responses"])):
            for j, partition in enumerate(entries(topic["partitions"])):
                data = partition["records"] or b""
                for batch in headers(data):
                    begin_ns = self._producers.get(batch.producer_id)
                    if batch.is_control and not batch.is_partial and begin_ns is not None:
                        path = f"responses[{i}].partitions[{j}].records"
                        time = max_timestamp(data[batch.pos : batch.pos + batch.size])
                        yield _BrokerTime(outcome, path, time, begin_ns, outcome.answered_ns)

    def _last_markers(self, outcome: Outcome, answer: Body) -> Iterator[_BrokerTime]:
        """Times of producers whose last transaction has ended: the broker wrote a marker then."""
        for i, topic in enumerate(entries(answer["topics"])):
            for j, partition in enumerate(entries(topic["partitions"])):
                for k, each in enumerate(entries(partition["active_producers"])):
                    begin_ns = self._producers.get(each["producer_id"])
                    has_marker = each["current_txn_start_offset"] < 0 <= each["coordinator_epoch"]
                    if has_marker and begin_ns is not None:
                        path = f"topics[{i}].partitions[{j}].active_producers[{k}].last_timestamp"
                        time = each["last_timestamp"]
                        yield _BrokerTime(outcome, path, time, begin_ns, outcome.answered_ns)

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        clocks = sorted({each.least_ms for each in self._stated})
        some = clocks[:: len(clocks) // _CLOCKS_MAX + 1]
        clock = max(some, key=self._agreeing, default=0)
        for each in self._stated:
            distance = each.distance_ms(clock)
            if distance > _SLACK_MS:
                note = f"{distance} ms from the clock that other times show"
                add(each.outcome, each.path, "a time of the run", each.time_ms, note)

    def _agreeing(self, clock_ms: int) -> int:
        return sum(each.distance_ms(clock_ms) <= _SLACK_MS for each in self._stated)

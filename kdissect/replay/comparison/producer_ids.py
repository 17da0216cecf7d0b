"""Finds producer ids and epochs in answers that contradict earlier ones of the run.

- A transactional id keeps its producer id until the epochs are exhausted. Its epoch rises with each
  InitProducerId, and does not fall with EndTxn (KIP-98, KIP-890).
- Beside an error there is no producer id; its epoch is -1 or, as others of the run, 0.
- ListTransactions and DescribeTransactions have a producer id that the transactional id has got.
- A producer without a transactional id gets a new producer id. The only broker gives them in
  ascending order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.model import Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import decoded, entries

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
Body = dict[str, Any]
_EXHAUSTED = 0x7F00  # coordinators give another producer id before the last epoch
_FIELDS = "producer_id", "producer_epoch"
_APIS = frozenset({ApiKey.INIT_PRODUCER_ID, ApiKey.END_TXN})
_READS = frozenset({ApiKey.LIST_TRANSACTIONS, ApiKey.DESCRIBE_TRANSACTIONS})


class _GivenProducer(NamedTuple):
    """The producer in an answer. is_raised: its epoch is a new one."""

    outcome: Outcome
    producer_id: int
    epoch: int
    is_raised: bool


class ProducerIds:
    """Producers that a run has got, by transactional id; "" without one."""

    def __init__(self, ids: IdMap) -> None:
        self._has_one_node = ids.target.has_one_node
        self._given: dict[str, list[_GivenProducer]] = defaultdict(list)
        self._unknown: set[str] = set()  # transactional ids of requests without an answer
        self._described: list[tuple[Outcome, str, Body]] = []  # transactions
        self._refused: list[_GivenProducer] = []  # beside errors

    def collect(self, outcome: Outcome) -> None:
        api_key = outcome.step.exchange.api_key
        if outcome.sent is None:
            return
        if api_key in _READS:
            answer = decoded(outcome.answer or b"", "response", api_key, outcome.api_version)
            states = None if answer is None else answer.body["transaction_states"]
            self._described += [
                (outcome, f"transaction_states[{at}].{_FIELDS[0]}", each)
                for at, each in enumerate(entries(states))
                if not each.get("error_code", 0)
            ]
        elif api_key in _APIS:
            earlier = map(outcome.with_answer, range(len(outcome.earlier)))
            for each in (*earlier, outcome):
                self._give(each, api_key)

    def _give(self, outcome: Outcome, api_key: int) -> None:
        """Add the producer in an answer to InitProducerId, or to EndTxn from v5 on."""
        request = decoded(outcome.sent or b"", "request", api_key, outcome.api_version)
        answer = decoded(outcome.answer or b"", "response", api_key, outcome.api_version)
        if request is None:
            return
        owner = request.body["transactional_id"] or ""
        if answer is None:
            self._unknown.add(owner)
        elif _FIELDS[0] in answer.body:
            producer_id, epoch = (answer.body[name] for name in _FIELDS)
            is_first = api_key == ApiKey.INIT_PRODUCER_ID
            is_raised = is_first and request.body.get(_FIELDS[0], -1) < 0
            given = _GivenProducer(outcome, producer_id, epoch, is_raised)
            if answer.body["error_code"]:
                self._refused.append(given)
            elif is_first or producer_id >= 0:
                self._given[owner].append(given)

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        for owner, given in self._given.items():
            done = sorted(given, key=lambda each: each.outcome.answered_ns)
            times = [each.outcome.answered_ns for each in done]
            highest = list(accumulate((each.producer_id for each in done), max))
            for producer in given:
                before = bisect_left(times, producer.outcome.sent_ns) - 1
                if before < 0:
                    continue
                if owner:
                    _check_owned(done[before], producer, add)
                elif self._has_one_node and producer.producer_id <= highest[before]:
                    note = "earlier answers have given those up to it"
                    expected = f"above {highest[before]}"
                    add(producer.outcome, _FIELDS[0], expected, producer.producer_id, note)
        self._check_described(add)
        self._check_refused(add)

    def _check_refused(self, add: Add) -> None:
        epochs = Counter(each.epoch for each in self._refused).most_common(1)
        known = {epochs[0][0]} if epochs and epochs[0][1] > 1 else {-1, 0}
        for each in self._refused:
            if each.producer_id != -1:
                add(each.outcome, _FIELDS[0], -1, each.producer_id, "beside an error")
            if each.epoch not in known:
                add(each.outcome, _FIELDS[1], min(known), each.epoch, "beside an error")

    def _check_described(self, add: Add) -> None:
        for outcome, path, described in self._described:
            owner, number = described["transactional_id"], described[_FIELDS[0]]
            given = self._given.get(owner, ())
            known = sorted({each.producer_id for each in given})
            is_exhausted = any(each.epoch >= _EXHAUSTED for each in given)
            if known and number not in known and owner not in self._unknown and not is_exhausted:
                note = "answers have given this one to the transactional id"
                add(outcome, path, " or ".join(map(str, known)), number, note)


def _check_owned(last: _GivenProducer, producer: _GivenProducer, add: Add) -> None:
    """Compare an answer about a transactional id with the last one before it."""
    if last.epoch >= _EXHAUSTED:
        return
    least = last.epoch + producer.is_raised
    if producer.producer_id != last.producer_id:
        note = "the transactional id has had this one"
        add(producer.outcome, _FIELDS[0], last.producer_id, producer.producer_id, note)
    elif producer.epoch < least:
        note = "an earlier answer has given this epoch"
        add(producer.outcome, _FIELDS[1], f"at least {least}", producer.epoch, note)

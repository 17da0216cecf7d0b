"""Finds ShareFetch answers that contradict themselves or the other deliveries of the run (KIP-932).

- A member gets just the records that it acquires, each once and in their order.
- A record that was delivered once in the run has the delivery count 1.
- A response names a leader only with an error that sends its client there (KIP-951).
- A description of a group's offsets has each partition of which a member has got records, until a
  request changes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batch_headers import headers
from kdissect.replay.comparison.records import merged_ranges
from kdissect.replay.model import Outcome
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import decoded, entries

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
Body = dict[str, Any]
_FOREVER = 1 << 62
_CHANGES = frozenset(
    {
        ApiKey.ALTER_SHARE_GROUP_OFFSETS, ApiKey.DELETE_SHARE_GROUP_OFFSETS, ApiKey.DELETE_GROUPS,
        ApiKey.DELETE_TOPICS,
    }
)  # fmt: skip


class _Delivery(NamedTuple):
    """Records that a member acquired."""

    first: int
    last: int
    delivery_count: int
    outcome: Outcome
    path: str


class ShareState:
    """Deliveries of a run."""

    def __init__(self, ids: IdMap) -> None:
        self._ids = ids
        self._partitions: list[tuple[Outcome, str, Body]] = []
        # by group, topic id and partition
        self._deliveries: dict[tuple[str, Any, int], list[_Delivery]] = defaultdict(list)
        self._unknown: set[str] = set()  # groups with requests that have no answer
        self._described: list[tuple[Outcome, str, Body]] = []  # groups with all topics
        self._changed_ns = _FOREVER  # when the first request changes the offsets of groups

    def collect(self, outcome: Outcome) -> None:
        api_key = outcome.step.exchange.api_key
        if outcome.sent is None:
            return
        if api_key in _CHANGES:
            self._changed_ns = min(self._changed_ns, outcome.sent_ns)
        elif api_key == ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS:
            self._describe(outcome)
        elif api_key == ApiKey.SHARE_FETCH:
            request = decoded(outcome.sent, "request", api_key, outcome.api_version)
            if request is not None:
                earlier = map(outcome.with_answer, range(len(outcome.earlier)))
                for each in (*earlier, outcome):
                    self._deliver(each, request.body["group_id"])

    def _describe(self, outcome: Outcome) -> None:
        frames = (outcome.sent or b"", "request"), (outcome.answer or b"", "response")
        request, answer = (
            decoded(frame, side, ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, outcome.api_version)
            for frame, side in frames
        )
        if request is None or answer is None:
            return
        names = {each["group_id"] for each in request.body["groups"] if each["topics"] is None}
        self._described += [
            (outcome, f"groups[{at}].topics", group)
            for at, group in enumerate(entries(answer.body["groups"]))
            if group["group_id"] in names and not group["error_code"]
        ]

    def _deliver(self, outcome: Outcome, group: str) -> None:
        answer = decoded(outcome.answer or b"", "response", ApiKey.SHARE_FETCH, outcome.api_version)
        if answer is None:
            self._unknown.add(group)
            return
        for i, topic in enumerate(entries(answer.body["responses"])):
            for j, partition in enumerate(entries(topic["partitions"])):
                if not partition["error_code"]:
                    path = f"responses[{i}].partitions[{j}]"
                    key = group, topic["topic_id"], partition["partition_index"]
                    self._add(outcome, path, key, partition)

    def _add(self, outcome: Outcome, path: str, key: tuple[str, Any, int], partition: Body) -> None:
        self._partitions.append((outcome, path, partition))
        self._deliveries[key] += [
            _Delivery(
                records["first_offset"], records["last_offset"], records["delivery_count"], outcome,
                f"{path}.acquired_records[{at}].delivery_count",
            )
            for at, records in enumerate(entries(partition["acquired_records"]))
        ]  # fmt: skip

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        for outcome, path, partition in self._partitions:
            _check_acquired(outcome, path, partition, add)
            _check_leader(outcome, path, partition, add)
        for outcome, path, described in self._described:
            self._check_described(outcome, path, described, add)
        for (group, _, _), deliveries in self._deliveries.items():
            if group not in self._unknown:
                _check_counts(deliveries, add)

    def _check_described(self, outcome: Outcome, path: str, group: Body, add: Add) -> None:
        listed = {
            (group["group_id"], topic["topic_id"], partition["partition_index"])
            for topic in entries(group["topics"])
            for partition in entries(topic["partitions"])
        }
        for key, deliveries in self._deliveries.items():
            is_known = any(each.outcome.answered_ns < outcome.sent_ns for each in deliveries)
            is_same = outcome.answered_ns < self._changed_ns
            if is_known and is_same and key[0] == group["group_id"] and key not in listed:
                note = "a member of the group has got records of it"
                topic_name = self._ids.target.names.get(key[1], key[1])
                add(outcome, path, f"{topic_name} partition {key[2]}", "not listed", note)


def _check_acquired(outcome: Outcome, path: str, partition: Body, add: Add) -> None:
    """A member of a share group gets just the records that it acquires, in whole batches."""
    batches = [
        (each.base_offset, each.last_offset) for each in headers(partition["records"] or b"")
    ]
    for (_, end), (begin, _) in pairwise(batches):
        if begin <= end:
            note = "twice or out of order"
            add(outcome, f"{path}.records", f"after offset {end}", f"offset {begin}", note)
    ranges = merged_ranges(batches)
    acquired = entries(partition["acquired_records"])
    if ranges and not acquired:
        note = "records without any that is acquired"
        add(outcome, f"{path}.acquired_records", "offsets of the records", "none", note)
    last = -1
    for each in acquired:
        first, end = each["first_offset"], each["last_offset"]
        if first <= last or not any(low <= first and end <= high for low, high in ranges):
            note = "no records of these offsets are here" if first > last else "acquired twice"
            here = f"{path}.acquired_records"
            add(outcome, here, "offsets of the records", f"{first} to {end}", note)
        last = max(last, end)


def _check_counts(deliveries: list[_Delivery], add: Add) -> None:
    ordered = sorted(deliveries, key=lambda delivery: delivery[:3])
    ends = [-1, *accumulate((delivery.last for delivery in ordered), max)]
    for at, delivery in enumerate(ordered):
        following = ordered[at + 1] if at + 1 < len(ordered) else None
        is_again = delivery.first <= ends[at] or (
            following is not None and following.first <= delivery.last
        )
        is_wrong = delivery.delivery_count < 1 or (delivery.delivery_count > 1 and not is_again)
        if is_wrong:
            wanted = "at least 1" if is_again else "1"
            note = "the number of answers that brought these records"
            add(delivery.outcome, delivery.path, wanted, delivery.delivery_count, note)


def _check_leader(outcome: Outcome, path: str, partition: Body, add: Add) -> None:
    """A partition without an error has no leader: -1, or 0 as the version's default."""
    for name in ("leader_id", "leader_epoch"):
        number = partition["current_leader"][name]
        if number > 0:
            note = "a leader is named beside an error only"
            add(outcome, f"{path}.current_leader.{name}", "none", number, note)

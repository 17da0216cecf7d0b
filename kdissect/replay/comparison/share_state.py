"""Finds ShareFetch answers that contradict themselves or the other deliveries of the run (KIP-932).

- A member gets just the records that it acquires, each once and in their order.
- A member acknowledges only records that it has acquired.
- The deliveries of a record have the counts from 1 to their number, at most.
- A response names a leader only with an error that sends its client there (KIP-951).
- A description of a group's offsets has each partition of which a member has got records, and
  starts after those that members had finished, until a request changes the offsets. Until then no
  start offset falls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batch_headers import headers
from kdissect.replay.comparison.records import merged_ranges
from kdissect.replay.model import FOREVER_NS, Outcome
from kdissect.replay.translation.fetch_sessions import AcquiredOffsets
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import SHARE_APIS, decoded, entries

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
Body = dict[str, Any]
_Member = tuple[str, str]  # group, member id
_Partition = tuple[str, Any, int]  # group, topic id, number
_FINISHING = frozenset({0, 1, 3})  # acknowledge types: gap, accept, reject
_CHANGES = frozenset(
    {
        ApiKey.ALTER_SHARE_GROUP_OFFSETS, ApiKey.DELETE_SHARE_GROUP_OFFSETS, ApiKey.DELETE_GROUPS,
        ApiKey.DELETE_TOPICS,
    }
)  # fmt: skip


class _Delivery(NamedTuple):
    """Records that a member acquired. number: of this delivery of the partition."""

    number: int
    first: int
    last: int
    delivery_count: int
    outcome: Outcome
    path: str


class _FinishedRecords(NamedTuple):
    """Records that a member has accepted or rejected, with its request."""

    first: int
    last: int
    outcome: Outcome


class ShareState:
    """Deliveries of a run."""

    def __init__(self, ids: IdMap) -> None:
        self._ids = ids
        self._partitions: list[tuple[Outcome, str, Body]] = []
        self._deliveries: dict[_Partition, list[_Delivery]] = defaultdict(list)
        self._unknown: set[str] = set()  # groups with requests that have no answer
        self._finished: dict[_Partition, list[_FinishedRecords]] = defaultdict(list)
        self._acquired: dict[_Member, AcquiredOffsets] = defaultdict(AcquiredOffsets)
        self._odd: list[tuple[Outcome, str, int]] = []  # with the group and the offset
        self._described: list[tuple[Outcome, str, Body, bool]] = []  # groups; with all topics?
        self._changed_ns = FOREVER_NS  # when the first request changes the offsets of groups

    def collect(self, outcome: Outcome) -> None:
        api_key = outcome.step.exchange.api_key
        if outcome.sent is None:
            return
        if api_key in _CHANGES:
            self._changed_ns = min(self._changed_ns, outcome.sent_ns)
        elif api_key == ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS:
            self._describe(outcome)
        elif api_key in SHARE_APIS:
            earlier = map(outcome.with_answer, range(len(outcome.earlier)))
            for each in (*earlier, outcome):
                self._share(each)

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
            (outcome, f"groups[{at}].topics", group, group["group_id"] in names)
            for at, group in enumerate(entries(answer.body["groups"]))
            if not group["error_code"]
        ]

    def _share(self, outcome: Outcome) -> None:
        """Add the acknowledgements and deliveries of a member."""
        api_key, version = outcome.step.exchange.api_key, outcome.api_version
        request = decoded(outcome.sent or b"", "request", api_key, version)
        answer = decoded(outcome.answer or b"", "response", api_key, version)
        if request is None:
            return
        group = request.body["group_id"]
        if answer is None:
            self._unknown.add(group)
            return
        member = group, request.body["member_id"] or ""
        self._acknowledge(outcome, member, request.body, answer.body)
        for i, topic in enumerate(entries(answer.body["responses"])):
            for j, partition in enumerate(entries(topic["partitions"])):
                if api_key == ApiKey.SHARE_FETCH and not partition["error_code"]:
                    path = f"responses[{i}].partitions[{j}]"
                    place = topic["topic_id"], partition["partition_index"]
                    self._add(outcome, path, (group, *place), partition)
                    for each in entries(partition["acquired_records"]):
                        ends = each["first_offset"], each["last_offset"]
                        self._acquired[member].add((str(place[0]), place[1]), *ends)

    def _acknowledge(self, outcome: Outcome, member: _Member, request: Body, answer: Body) -> None:
        """Note acknowledgements that the broker takes, of records that the member has not got."""
        codes = {
            (str(topic["topic_id"]), partition["partition_index"]): partition.get(
                "acknowledge_error_code", partition["error_code"]
            )
            for topic in entries(answer["responses"])
            for partition in entries(topic["partitions"])
        }
        for topic in entries(request["topics"]):
            for partition in entries(topic["partitions"]):
                log = str(topic["topic_id"]), partition["partition_index"]
                batches = entries(partition["acknowledgement_batches"])
                key = member[0], topic["topic_id"], partition["partition_index"]
                for batch in batches if codes.get(log) == 0 else ():
                    self._finished[key] += [
                        _FinishedRecords(*ends, outcome) for ends in _finished_ends(batch)
                    ]
                    for offset in sorted({batch["first_offset"], batch["last_offset"]}):
                        if not self._acquired[member].covers(log, offset, offset):
                            self._odd.append((outcome, member[0], offset))

    def _add(self, outcome: Outcome, path: str, key: _Partition, partition: Body) -> None:
        self._partitions.append((outcome, path, partition))
        self._deliveries[key] += [
            _Delivery(
                len(self._deliveries[key]) + at, records["first_offset"], records["last_offset"],
                records["delivery_count"], outcome, f"{path}.acquired_records[{at}].delivery_count",
            )
            for at, records in enumerate(entries(partition["acquired_records"]))
        ]  # fmt: skip

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        for outcome, path, partition in self._partitions:
            _check_acquired(outcome, path, partition, add)
            _check_leader(outcome, path, partition, add)
        for outcome, path, described, is_whole in self._described:
            listed = Counter(
                (described["group_id"], topic["topic_id"], partition["partition_index"])
                for topic in entries(described["topics"])
                for partition in entries(topic["partitions"])
            )
            for at, topic in enumerate(entries(described["topics"])):
                name = self._name(topic["topic_id"])
                if topic["topic_id"] in self._ids.target.names and topic["topic_name"] != name:
                    note = "the topic with this id has another name"
                    where = f"{path}[{at}].topic_name"
                    add(outcome, where, name, topic["topic_name"], note)
            for (_, topic_id, number), count in listed.items():
                if count > 1:
                    text = f"{self._name(topic_id)} partition {number}"
                    add(outcome, path, "each partition once", text, "it is listed twice")
            if is_whole and outcome.answered_ns < self._changed_ns:
                self._check_listed(outcome, path, described["group_id"], listed, add)
                self._check_starts(outcome, path, described, add)
        self._check_falling_starts(add)
        for outcome, group, offset in self._odd:
            if group not in self._unknown:
                note = "it is acknowledged without an error"
                add(outcome, "responses", f"offset {offset} acquired", "not acquired", note)
        for (group, _, _), deliveries in self._deliveries.items():
            if group not in self._unknown:
                _check_counts(deliveries, add)

    def _name(self, topic_id: Any) -> str:
        return self._ids.target.names.get(topic_id, str(topic_id))

    def _check_listed(
        self, outcome: Outcome, path: str, group: str, listed: Counter[_Partition], add: Add
    ) -> None:
        for key, deliveries in self._deliveries.items():
            is_known = any(each.outcome.answered_ns < outcome.sent_ns for each in deliveries)
            if is_known and key[0] == group and key not in listed:
                note = "a member of the group has got records of it"
                text = f"{self._name(key[1])} partition {key[2]}"
                add(outcome, path, text, "not listed", note)

    def _check_starts(self, outcome: Outcome, path: str, described: Body, add: Add) -> None:
        """A group starts after all records that its members had finished when they sent the last
        acknowledgement: the broker stores the start offset beside that (KIP-932)."""
        for i, topic in enumerate(entries(described["topics"])):
            for j, partition in enumerate(entries(topic["partitions"])):
                key = described["group_id"], topic["topic_id"], partition["partition_index"]
                done = [
                    each
                    for each in self._finished.get(key, ())
                    if each.outcome.answered_ns < outcome.sent_ns
                ]
                last_ns = max((each.outcome.sent_ns for each in done), default=-1)
                ranges = merged_ranges(
                    each[:2] for each in done if each.outcome.answered_ns < last_ns
                )
                start, least = partition["start_offset"], ranges[0][1] + 1 if ranges else 0
                if ranges and ranges[0][0] == 0 and start < least and key[0] not in self._unknown:
                    note = "members have finished the records before it"
                    where = f"{path}[{i}].partitions[{j}].start_offset"
                    add(outcome, where, f"at least {least}", start, note)

    def _check_falling_starts(self, add: Add) -> None:
        """A group's start offset of a partition does not fall until a request changes it: records
        that are finished stay so (KIP-932)."""
        last: dict[_Partition, tuple[Outcome, str, int]] = {}
        for outcome, path, described, _ in self._described:
            for i, topic in enumerate(entries(described["topics"])):
                for j, partition in enumerate(entries(topic["partitions"])):
                    key = described["group_id"], topic["topic_id"], partition["partition_index"]
                    start = partition["start_offset"]
                    if partition["error_code"] or outcome.answered_ns >= self._changed_ns:
                        continue
                    before, where, higher = last.get(key, (outcome, "", -1))
                    if 0 <= start < higher and before.answered_ns <= outcome.sent_ns:
                        add(before, where, f"at most {start}", higher, "a later answer is lower")
                    last[key] = outcome, f"{path}[{i}].partitions[{j}].start_offset", start


def _finished_ends(batch: Body) -> Iterator[tuple[int, int]]:
    """(first, last) offsets of the records that an acknowledgement finishes. It has one type for
    all records, or one for each."""
    first, types = batch["first_offset"], batch["acknowledge_types"]
    if len(types) == 1 and types[0] in _FINISHING:
        yield first, batch["last_offset"]
    elif len(types) > 1:
        yield from ((first + at,) * 2 for at, kind in enumerate(types) if kind in _FINISHING)


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
    """The deliveries of a record have counts from 1 on, none above their number. Some have the same
    one, if a session has ended in between."""
    starts: dict[int, list[_Delivery]] = defaultdict(list)
    for each in deliveries:
        starts[each.first].append(each)
    open_now: list[_Delivery] = []
    wrong: dict[int, tuple[_Delivery, int]] = {}  # with the number of deliveries
    for offset in sorted({*starts, *(each.last + 1 for each in deliveries)}):
        open_now = [each for each in open_now if each.last >= offset] + starts.get(offset, [])
        count = len(open_now)
        lowest = min(open_now, key=lambda each: each.delivery_count, default=None)
        if lowest is not None and lowest.delivery_count != 1:
            wrong[lowest.number] = lowest, count
        wrong |= {each.number: (each, count) for each in open_now if each.delivery_count > count}
    for each, count in wrong.values():
        note = "the number of answers that brought these records"
        wanted = "1" if count == 1 else f"1 to {count}"
        add(each.outcome, each.path, wanted, each.delivery_count, note)


def _check_leader(outcome: Outcome, path: str, partition: Body, add: Add) -> None:
    """A partition without an error has no leader: -1, or 0 as the version's default."""
    for name in ("leader_id", "leader_epoch"):
        number = partition["current_leader"][name]
        if number > 0:
            note = "a leader is named beside an error only"
            add(outcome, f"{path}.current_leader.{name}", "none", number, note)

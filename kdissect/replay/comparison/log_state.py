"""Finds answers that contradict what the run has shown of the target's logs.

A captured response says what another broker answered at another moment. This module compares the
target's answers with each other, and with what the target acknowledged:

- An answer has each requested partition, but in a session those with news (KIP-227).
- A batch has the append time of its Produce response.
- Batches of an answer begin at the fetched offset, ascend, and leave no offset out unless the topic
  is compacted. What was produced in this run comes back unchanged.
- An answer has records if the high watermark says that there are some and no limit forbids them.
- A high watermark never falls, is not below delivered or acknowledged records, and not above the
  last offset that anything else shows. The last stable offset is never above the high watermark.
- A broker with room for one fetch session makes some (KIP-227).
- A read_committed answer lists each aborted transaction that it has data of (KIP-98).
- An epoch ends at an offset that the log can have, and the current one at its end (KIP-101).
- A share group's records begin and end at offsets that the log can have.
- A record that was looked up by its time is no older than that, and no newer than its batch.
- A log starts no earlier than DeleteRecords has requested.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from kdissect.codec.message import Message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batch_headers import (
    BATCH_HEADER_SIZE,
    BatchHeader,
    has_append_time,
    headers,
    max_timestamp,
)
from kdissect.replay.comparison.records import is_abort_marker, merged_ranges
from kdissect.replay.model import FOREVER_NS, Outcome
from kdissect.replay.translation.fetch_sessions import FINAL_EPOCH, INITIAL_EPOCH
from kdissect.replay.translation.id_map import IdMap
from kdissect.replay.workload.messages import decoded, entries, response_of

_LATEST, _READ_COMMITTED, _ACKS_ALL = -1, 1, -1
_WITHOUT_TIME = frozenset({-1, -2, -4, -5})  # ends and starts, also of tiered logs (KIP-405)
_MANY = 1 << 40  # messages before magic 2 do not say how many they wrap
_BATCH_MAX = 1 << 20  # max.message.bytes by default: a smaller limit may leave any batch out
_POLICY, _LEFT_OUT = "cleanup.policy", "are left out"
_CODEC_AT, _CODEC_MASK, _COUNT_AT = 22, 7, 57
_READING_NS, _UNANSWERED_NS = 2_000_000_000, 5_000_000_000
_MARKER_APIS = frozenset({ApiKey.END_TXN, ApiKey.INIT_PRODUCER_ID})

Add = Callable[[Outcome, str, Any, Any, str], None]  # path, expected, answered, note
TargetLog = tuple[str, int]  # the target's name of a topic, partition
Body = dict[str, Any]


@dataclass(slots=True)
class _Fetched:
    """A partition of a Fetch response. fetch_offset: -1 unknown. bytes_left: of the request's
    limit, without this partition; partition_limit: of the partition."""

    outcome: Outcome
    path: str
    body: Body
    batches: list[BatchHeader]
    fetch_offset: int
    is_committed: bool
    bytes_left: int
    partition_limit: int

    @property
    def end(self) -> int:
        """The offset after the last delivered record; -1 if there is none."""
        return self.batches[-1].last_offset + 1 if self.batches else -1

    @property
    def readable_end(self) -> int:
        """The first offset that the broker must not deliver."""
        end: int = self.body["high_watermark"]
        stable: int = self.body.get("last_stable_offset", -1)
        return min(end, stable) if self.is_committed and stable >= 0 else end


@dataclass(slots=True)
class _Log:
    """Facts of one log. acknowledged: base offset -> the batch, or b"" of several.
    claims: (first, last offset, outcome, path) by Produce responses. times: by base offset, when
    the broker appended a batch.
    floors: (answered_ns, offset) that the log end had reached, visible to consumers. stated:
    (API, offset): log ends by answers. appends: (sent_ns, answered_ns, record count). batches: by
    base offset, delivered. unknown_records: written without an offset in an answer.
    """

    acknowledged: dict[int, bytes] = field(default_factory=dict)
    claims: list[tuple[int, int, Outcome, str]] = field(default_factory=list)
    times: dict[int, tuple[Outcome, str, int]] = field(default_factory=dict)
    fetched: list[_Fetched] = field(default_factory=list)
    floors: list[tuple[int, int]] = field(default_factory=list)
    stated: list[tuple[int, int]] = field(default_factory=list)
    ends: list[tuple[Outcome, str, int]] = field(default_factory=list)  # to be checked
    appends: list[tuple[int, int, int]] = field(default_factory=list)
    batches: dict[int, tuple[BatchHeader, bytes]] = field(default_factory=dict)
    latest: list[tuple[Outcome, str, int]] = field(default_factory=list)  # its end, by answers
    found: list[tuple[Outcome, str, int, int]] = field(default_factory=list)  # offset, time
    unknown_records: int = 0
    is_transactional: bool = False


class _Appends:
    """Appends of a log, by time. intervals: (sent_ns, answered_ns, record count)."""

    def __init__(self, intervals: Sequence[tuple[int, int, int]]) -> None:
        self._begun, self._done = (
            sorted((interval[at], interval[2]) for interval in intervals) for at in (0, 1)
        )
        self._sums = [
            [0, *accumulate(count for _, count in events)] for events in (self._begun, self._done)
        ]

    def meanwhile(self, outcome: Outcome) -> int:
        """The number of records that may have been appended while a broker made its answer. It
        reads the high watermark, the last stable offset and the records one after the other."""
        begin_ns = max(outcome.sent_ns, outcome.answered_ns - _READING_NS)
        begun = bisect_right(self._begun, (outcome.answered_ns, _MANY))
        done = bisect_left(self._done, (begin_ns, 0))
        return self._sums[0][begun] - self._sums[1][done]


class LogState:
    """Facts of a run about all logs."""

    def __init__(self, ids: IdMap) -> None:
        self._ids = ids
        self._logs: dict[TargetLog, _Log] = defaultdict(_Log)
        self._sessions: dict[tuple[int | None, int], dict[tuple[Any, int], Body]] = {}
        self._removed: set[str] = set()  # topics that the run deletes, or whose records
        self._altered_groups: set[str] = set()  # share groups whose offsets the run sets
        self._sparse: set[str] | None = None
        self._odd: list[tuple[Outcome, str, Any, Any, str]] = []  # without any other response
        self._markers: list[tuple[int, int, int]] = []  # as appends, of any transactional log
        self._no_sessions: list[Outcome] = []  # where the captured broker has made one
        self._has_sessions = False
        self._has_one_node = ids.target.has_one_node
        self._by_api: dict[int, Callable[[Outcome, Message, Message | None], None]] = {
            ApiKey.PRODUCE: self._produce,
            ApiKey.FETCH: self._fetch,
            ApiKey.LIST_OFFSETS: self._list_offsets,
            ApiKey.OFFSET_FOR_LEADER_EPOCH: self._epoch_end,
            ApiKey.ALTER_SHARE_GROUP_OFFSETS: self._alter_share_offsets,
            ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS: self._share_offsets,
            ApiKey.DELETE_TOPICS: self._remove,
            ApiKey.DELETE_RECORDS: self._remove,
        }

    # -- facts ----------------------------------------------------------------------------------

    def collect(self, outcome: Outcome) -> None:
        api_key = outcome.step.exchange.api_key
        if outcome.sent is None:
            return
        if api_key in _MARKER_APIS:
            begin_ns = outcome.sent_ns
            self._markers.append((begin_ns, begin_ns + _UNANSWERED_NS, 1))
        if api_key in self._by_api:
            request = decoded(outcome.sent, "request", api_key, outcome.api_version)
            answer = decoded(outcome.answer or b"", "response", api_key, outcome.api_version)
            if request is not None:
                self._by_api[api_key](outcome, request, answer)

    def _produce(self, outcome: Outcome, request: Message, answer: Message | None) -> None:
        answered = {
            (self._ids.target.topic_name(topic), partition["index"]): (
                f"responses[{i}].partition_responses[{j}].base_offset",
                partition,
            )
            for i, topic in enumerate(entries(None if answer is None else answer.body["responses"]))
            for j, partition in enumerate(entries(topic["partition_responses"]))
        }
        for topic in entries(request.body["topic_data"]):
            for partition in entries(topic["partition_data"]):
                key = self._ids.target.topic_name(topic), partition["index"]
                log, data = self._logs[key], partition["records"] or b""
                batches = list(headers(data))
                count = sum(max(each.record_count, 0) for each in batches)
                sent_ns, answered_ns = outcome.sent_ns, outcome.answered_ns
                done_ns = answered_ns if answered_ns >= 0 else sent_ns + _UNANSWERED_NS
                log.appends.append((sent_ns, done_ns, count))
                log.is_transactional |= any(each.is_transactional for each in batches)
                path, response = answered.get(key, ("", None))
                base = -1 if response is None or response["error_code"] else response["base_offset"]
                if base < 0 or any(each.magic != 2 for each in batches):
                    log.unknown_records += count if base < 0 else _MANY
                    continue
                log.acknowledged[base] = data if len(batches) == 1 else b""
                log.claims.append((base, base + count - 1, outcome, path))
                time = response.get("log_append_time_ms", -1)
                if time >= 0:
                    log.times[base] = outcome, f"{path.rpartition('.')[0]}.log_append_time_ms", time
                log.stated.append((ApiKey.PRODUCE, base + count))
                if request.body["acks"] == _ACKS_ALL or self._has_one_node:
                    log.floors.append((outcome.answered_ns, base + count))

    def _fetch(self, outcome: Outcome, request: Message, answer: Message | None) -> None:
        body = request.body
        named = {
            (self._ids.target.topic_name(topic), partition["partition"]): partition
            for topic in entries(body["topics"])
            for partition in entries(topic["partitions"])
        }
        session_id, epoch = body.get("session_id", 0), body.get("session_epoch", FINAL_EPOCH)
        if epoch not in (FINAL_EPOCH, INITIAL_EPOCH):
            known = self._sessions.setdefault((outcome.node_id, session_id), {})
            known.update(named)
            named = known
        if answer is None or answer.body.get("error_code", 0):
            return
        self._check_session(outcome, session_id, epoch, answer.body.get("session_id", 0))
        if epoch == INITIAL_EPOCH and answer.body.get("session_id", 0):
            self._sessions[outcome.node_id, answer.body["session_id"]] = named
        self._add_fetched(outcome, body, named, answer.body)

    def _add_fetched(
        self, outcome: Outcome, request: Body, named: dict[TargetLog, Body], answer: Body
    ) -> None:
        """Add the partitions of an answer. named: those of the request and its session."""
        is_full = request.get("session_epoch", FINAL_EPOCH) in (FINAL_EPOCH, INITIAL_EPOCH)
        partitions = [
            (
                f"responses[{i}].partitions[{j}]",
                (self._ids.target.topic_name(topic), partition["partition_index"]),
                partition,
            )
            for i, topic in enumerate(entries(answer["responses"]))
            for j, partition in enumerate(entries(topic["partitions"]))
        ]  # fmt: skip
        missing = named.keys() - {key for _, key, _ in partitions}
        # KIP-219: a throttled Fetch response may have no partitions
        if is_full and missing and not answer.get("throttle_time_ms", 0):
            topic, number = sorted(missing)[0]
            found = f"not {topic} partition {number}"
            self._odd.append((outcome, "responses", "each partition", found, "it was requested"))
        size = sum(len(partition["records"] or b"") for _, _, partition in partitions)
        for path, key, partition in partitions:
            if partition["error_code"]:
                continue
            log, data = self._logs[key], partition["records"] or b""
            batches = [each for each in headers(data) if not each.is_partial]
            wanted = named.get(key, {})
            fetched = _Fetched(
                outcome, path, partition, batches, wanted.get("fetch_offset", -1),
                request.get("isolation_level", 0) == _READ_COMMITTED,
                request.get("max_bytes", 0x7FFFFFFF) - size, wanted.get("partition_max_bytes", 0),
            )  # fmt: skip
            log.fetched.append(fetched)
            for each in batches:
                log.batches.setdefault(
                    each.base_offset, (each, data[each.pos : each.pos + each.size])
                )
            if batches:
                log.stated.append((-1, fetched.end))
                log.floors.append((outcome.answered_ns, fetched.end))
            log.stated.append((ApiKey.FETCH, partition["high_watermark"]))
            log.ends.append((outcome, f"{path}.high_watermark", partition["high_watermark"]))

    def _check_session(self, outcome: Outcome, session_id: int, epoch: int, answered: int) -> None:
        """A response has the session of its request, and none if that ends it (KIP-227). A request
        to several brokers has none."""
        expected = 0 if epoch == FINAL_EPOCH else session_id
        self._has_sessions |= answered > 0
        if epoch == INITIAL_EPOCH and not answered:
            captured = response_of(outcome.step.exchange)
            if captured is not None and captured.body.get("session_id", 0):
                self._no_sessions.append(outcome)
        if self._has_one_node and epoch != INITIAL_EPOCH and answered != expected:
            self._odd.append((outcome, "session_id", expected, answered, "not the request's"))

    def _list_offsets(self, outcome: Outcome, request: Message, answer: Message | None) -> None:
        wanted = {
            (self._ids.target.topic_name(topic), partition["partition_index"]): partition[
                "timestamp"
            ]
            for topic in entries(request.body["topics"])
            for partition in entries(topic["partitions"])
        }
        for i, topic in enumerate(entries(answer.body["topics"] if answer is not None else None)):
            for j, partition in enumerate(entries(topic["partitions"])):
                key = self._ids.target.topic_name(topic), partition["partition_index"]
                offset = partition.get("offset", -1)
                if partition["error_code"] or offset < 0:
                    continue
                path = f"topics[{i}].partitions[{j}].offset"
                self._logs[key].ends.append((outcome, path, offset))
                self._find(outcome, f"{path[:-6]}timestamp", key, partition, wanted.get(key, -1))
                if wanted.get(key) == _LATEST:
                    self._logs[key].stated.append((ApiKey.LIST_OFFSETS, offset))
                    if request.body.get("isolation_level", 0) != _READ_COMMITTED:
                        self._logs[key].latest.append((outcome, path, offset))

    def _find(self, outcome: Outcome, path: str, key: TargetLog, answered: Body, due: int) -> None:
        """Note the time of a record that ListOffsets has found. due: the requested time."""
        time = answered.get("timestamp", -1)
        if time >= 0 and due in _WITHOUT_TIME:
            self._odd.append((outcome, path, -1, time, "a bound of the log has no time"))
        elif 0 <= time < due:
            self._odd.append((outcome, path, f"at least {due}", time, "the requested time"))
        elif time >= 0:
            self._logs[key].found.append((outcome, path, answered["offset"], time))

    def _epoch_end(self, outcome: Outcome, request: Message, answer: Message | None) -> None:
        for i, topic in enumerate(entries(answer.body["topics"] if answer is not None else None)):
            for j, partition in enumerate(entries(topic["partitions"])):
                if not partition["error_code"] and partition["end_offset"] >= 0:
                    key = self._ids.target.topic_name(topic), partition["partition"]
                    path = f"topics[{i}].partitions[{j}].end_offset"
                    end = outcome, path, partition["end_offset"]
                    self._logs[key].ends.append(end)
                    epoch = self._ids.target.leaders.get(key, (-1, -1))[1]
                    if 0 <= epoch == partition.get("leader_epoch", -1):
                        self._logs[key].latest.append(end)  # the current epoch ends with the log

    def _alter_share_offsets(
        self, outcome: Outcome, request: Message, answer: Message | None
    ) -> None:
        self._altered_groups.add(request.body["group_id"])

    def _share_offsets(self, outcome: Outcome, request: Message, answer: Message | None) -> None:
        """Add the ends of logs that a share group's start offset and lag show (KIP-1226)."""
        for g, group in enumerate(entries(None if answer is None else answer.body["groups"])):
            if group["group_id"] in self._altered_groups:
                continue  # a request may set any offset
            for i, topic in enumerate(entries(group["topics"])):
                for j, partition in enumerate(entries(topic["partitions"])):
                    start, lag = partition["start_offset"], partition.get("lag", -1)
                    path = f"groups[{g}].topics[{i}].partitions[{j}]"
                    key = self._ids.target.topic_name(topic), partition["partition_index"]
                    if start >= 0 and not partition["error_code"]:
                        self._logs[key].ends.append((outcome, f"{path}.start_offset", start))
                        end = outcome, f"{path}.lag", start + max(lag, 0)
                        self._logs[key].ends.append(end)

    def _remove(self, outcome: Outcome, request: Message, answer: Message | None) -> None:
        self._removed.update(entries(request.body.get("topic_names")))
        self._removed.update(
            self._ids.target.topic_name(each) for each in entries(request.body.get("topics"))
        )
        if request.api_key == ApiKey.DELETE_RECORDS and answer is not None:
            self._check_deleted(outcome, request.body, answer.body)

    def _check_deleted(self, outcome: Outcome, request: Body, answer: Body) -> None:
        wanted = {
            (topic["name"], partition["partition_index"]): partition["offset"]
            for topic in entries(request["topics"])
            for partition in entries(topic["partitions"])
        }
        for i, topic in enumerate(entries(answer["topics"])):
            for j, partition in enumerate(entries(topic["partitions"])):
                due = wanted.get((topic["name"], partition["partition_index"]), -1)
                start = partition["low_watermark"]
                if not partition["error_code"] and start < due:
                    path = f"topics[{i}].partitions[{j}].low_watermark"
                    self._odd.append((outcome, path, f"at least {due}", start, "the requested one"))

    # -- contradictions -------------------------------------------------------------------------

    def check(self, add: Add) -> None:
        for odd in self._odd:
            add(*odd)
        if self._has_one_node and not self._has_sessions:
            for outcome in self._no_sessions:
                add(outcome, "session_id", "a session", 0, "no request of the run gets one")
        for (topic, _), log in self._logs.items():
            for fetched in log.fetched:
                self._check_order(topic, fetched, add)
            if not topic or topic in self._removed:
                continue
            self._check_ends(log, add)
            _check_claims(log, add)
            _check_times(log, add)
            _check_found(log, add)
            aborted, committed = _transactions(log)
            for fetched in log.fetched:
                self._check_preferred_replica(fetched, add)
                _check_unchanged(log, fetched, add)
                self._check_not_withheld(topic, log, fetched, add)
                _check_aborted(fetched, aborted, committed, log, add)

    def _is_dense(self, topic: str) -> bool:
        """Return whether a log leaves no offset out. Compacted ones may; the capture shows
        which."""
        name = self._ids.captured_topic_name(topic)
        facts = self._ids.plan.workload.facts.topics.get(name)
        if facts is None or facts.is_internal or "compact" in facts.configs.get(_POLICY, ""):
            return False
        if self._sparse is None:
            self._sparse = _sparse_topics(self._ids)
        return name not in self._sparse

    def _check_ends(self, log: _Log, add: Add) -> None:
        """Report log ends in responses that are below earlier ones, or above all that can exist."""
        is_fresh = 0 in log.acknowledged
        markers = len(self._markers) if log.is_transactional else 0
        tops: dict[int, int] = {}
        for api_key, offset in log.stated:
            tops[api_key] = max(tops.get(api_key, 0), offset)
        credible: list[tuple[int, int]] = list(log.floors)
        excess: set[tuple[int, str]] = set()
        for outcome, path, offset in log.ends:
            own = outcome.step.exchange.api_key
            top = max((end for api_key, end in tops.items() if api_key != own), default=-1)
            possible = top + markers + log.unknown_records
            if is_fresh and offset > possible:
                note = "nothing else shows that the log is so long"
                add(outcome, path, f"at most {possible}", offset, note)
                excess.add((outcome.step.number, path))
            elif own == ApiKey.FETCH and self._has_one_node:
                credible.append((outcome.answered_ns, offset))
        credible.sort()
        times = [answered_ns for answered_ns, _ in credible]
        floors: list[int] = []
        for _, offset in credible:
            floors.append(max(offset, floors[-1] if floors else offset))
        for outcome, path, offset in log.latest if self._has_one_node else ():
            place = bisect_left(times, outcome.sent_ns) - 1
            if place >= 0 and offset < floors[place]:
                add(outcome, path, f"at least {floors[place]}", offset, _SHOWED_MORE)
        stable_floors, appends = _StableFloors(log), _Appends([*log.appends, *self._markers])
        for fetched in log.fetched:
            self._check_watermarks(appends, fetched, times, floors, stable_floors, add)

    def _check_watermarks(
        self, appends: _Appends, fetched: _Fetched, times: Sequence[int], floors: Sequence[int],
        stable_floors: _StableFloors, add: Add,
    ) -> None:  # fmt: skip
        outcome, body = fetched.outcome, fetched.body
        watermark, stable = body["high_watermark"], body.get("last_stable_offset", -1)
        start = body.get("log_start_offset", -1)
        ends_late = fetched.is_committed and 0 <= stable < fetched.end
        is_plain = max(fetched.end, stable, start) <= watermark and not ends_late
        appended = 0 if is_plain else appends.meanwhile(outcome)
        path = f"{fetched.path}.high_watermark"
        if fetched.end > watermark + appended:
            add(outcome, path, f"at least {fetched.end}", watermark, "records after it are here")
        else:
            place = bisect_left(times, outcome.sent_ns) - 1
            if self._has_one_node and place >= 0 and watermark < floors[place]:
                add(outcome, path, f"at least {floors[place]}", watermark, _SHOWED_MORE)
        if stable > watermark + appended:
            note = "it is above the high watermark"
            add(outcome, f"{fetched.path}.last_stable_offset", f"at most {watermark}", stable, note)
        if ends_late and stable < fetched.end - appended:
            note = "records after it are here"
            path = f"{fetched.path}.last_stable_offset"
            add(outcome, path, f"at least {fetched.end}", stable, note)
        floor = stable_floors.at(watermark) if stable >= 0 else -1
        if stable < floor and stable < floor - appends.meanwhile(outcome):
            note = "no transaction is open there"
            add(outcome, f"{fetched.path}.last_stable_offset", f"at least {floor}", stable, note)
        if start > watermark + appended:
            note = "it is above the high watermark"
            add(outcome, f"{fetched.path}.log_start_offset", f"at most {watermark}", start, note)

    def _check_preferred_replica(self, fetched: _Fetched, add: Add) -> None:
        """A broker sends its client only to another broker, and without records (KIP-392)."""
        replica = fetched.body.get("preferred_read_replica", -1)
        others = self._ids.target.nodes.keys() - {fetched.outcome.node_id}
        if replica >= 0 and (replica not in others or fetched.batches):
            path = f"{fetched.path}.preferred_read_replica"
            add(fetched.outcome, path, "another broker", replica, "this one has to answer")

    def _check_order(self, topic: str, fetched: _Fetched, add: Add) -> None:
        for inside, expected, answered, note in _disorder(fetched.batches, fetched.fetch_offset):
            is_removed = topic in self._removed  # DeleteRecords leaves offsets out
            if _LEFT_OUT not in note or (not is_removed and self._is_dense(topic)):
                path = f"{fetched.path}.records{inside}"
                add(fetched.outcome, path, expected, answered, note)

    def _check_not_withheld(self, topic: str, log: _Log, fetched: _Fetched, add: Add) -> None:
        """Records that the answer itself says are there, and that no limit keeps back."""
        outcome, body = fetched.outcome, fetched.body
        begin = fetched.end if fetched.batches else fetched.fetch_offset
        if (
            begin < 0
            or begin >= fetched.readable_end
            or outcome.api_version < 4
            or begin < body.get("log_start_offset", -1)
            or body.get("preferred_read_replica", -1) >= 0
            or not self._has_one_node
        ):
            return
        size = sum(each.size for each in fetched.batches)
        allowed = min(fetched.bytes_left, fetched.partition_limit - size)
        following = log.batches.get(begin)
        wanted = following[0].size if following is not None else _BATCH_MAX
        if fetched.batches and following is None:
            return  # the next batch may be larger than the bytes left
        facts = self._ids.plan.workload.facts.topics.get(self._ids.captured_topic_name(topic))
        if fetched.batches and facts is not None and facts.configs.keys() & _SEGMENT_CONFIGS:
            return  # an answer ends with its segment
        if allowed >= wanted:
            note = f"it says that records go on to offset {fetched.readable_end - 1}"
            answered = f"ends before offset {begin}"
            add(outcome, f"{fetched.path}.records", "records", answered, note)


def _check_found(log: _Log, add: Add) -> None:
    """The time of a found record is not after the last one of its batch, if that was delivered."""
    starts = sorted(log.batches) if log.found else []
    for outcome, path, offset, time in log.found:
        place = bisect_right(starts, offset) - 1
        header, batch = log.batches[starts[place]] if place >= 0 else (None, b"")
        is_known = header is not None and offset <= header.last_offset and header.magic == 2
        if is_known and len(batch) >= BATCH_HEADER_SIZE and time > max_timestamp(batch):
            note = "the last time of its batch"
            add(outcome, path, f"at most {max_timestamp(batch)}", time, note)


_SHOWED_MORE = "an earlier answer showed more"
_SEGMENT_CONFIGS = frozenset({"segment.bytes", "segment.ms"})


def _disorder(batches: Sequence[BatchHeader], due: int) -> Iterator[tuple[str, str, str, str]]:
    """(path after "records", expected, answered, note) where batches do not begin at the offset
    `due` (-1 unknown), ascend and follow each other."""
    for at, batch in enumerate(batches):
        span = batch.last_offset - batch.base_offset + 1
        here = f"offset {batch.base_offset}"
        if due >= 0 and (batch.last_offset < due or (at and batch.base_offset < due)):
            yield "", f"offset {due}", here, "twice or out of order"
        elif batch.magic == 2 and 0 <= due < batch.base_offset:
            yield "", f"offset {due}", here, f"{batch.base_offset - due} offsets {_LEFT_OUT}"
        if batch.magic == 2 and batch.record_count != span:
            said = f"{batch.record_count} records"
            yield f"[{here}]", f"{span} records", said, f"some offsets {_LEFT_OUT}"
        due = max(due, batch.last_offset + 1)


def _sparse_topics(ids: IdMap) -> set[str]:
    """Topics whose captured answers leave offsets out."""
    topics = set()
    for exchange in ids.plan.workload.exchanges():
        response = response_of(exchange) if exchange.api_key == ApiKey.FETCH else None
        for topic in entries(response.body["responses"] if response is not None else None):
            for partition in entries(topic["partitions"]):
                batches = list(headers(partition["records"] or b""))
                whole = [each for each in batches if not each.is_partial]
                if any(_LEFT_OUT in note for *_, note in _disorder(whole, -1)):
                    topics.add(ids.topic_name(topic.get("topic") or "", topic.get("topic_id")))
    return topics


def _check_unchanged(log: _Log, fetched: _Fetched, add: Add) -> None:
    """Batches that this run produced come back as they were sent, unless they are compressed in
    another way."""
    data = fetched.body["records"] or b""
    for batch in fetched.batches:
        sent = log.acknowledged.get(batch.base_offset, b"")
        if batch.magic != 2 or len(sent) < BATCH_HEADER_SIZE or batch.is_control:
            continue
        delivered = data[batch.pos : batch.pos + batch.size]
        if (sent[_CODEC_AT] ^ delivered[_CODEC_AT]) & _CODEC_MASK:
            continue
        if sent[_COUNT_AT : batch.size] != delivered[_COUNT_AT:]:
            here = f"{fetched.path}.records[offset {batch.base_offset}]"
            note = "not the batch that was produced there"
            add(fetched.outcome, here, "as produced", "other records", note)


def _check_claims(log: _Log, add: Add) -> None:
    """Produce responses give each offset once, and the one at which the batch is delivered."""
    ranges = merged_ranges((each.base_offset, each.last_offset) for each, _ in log.batches.values())
    starts, end = [first for first, _ in ranges], -1
    for base, last, outcome, path in sorted(log.claims, key=lambda claim: claim[:2]):
        place = bisect_right(starts, base) - 1
        if base <= end and log.acknowledged[base]:
            add(outcome, path, f"after {end}", base, "another batch has this offset")
        elif place >= 0 and base <= ranges[place][1] and base not in log.batches:
            add(outcome, path, "the first of a batch", base, "it is inside of a delivered batch")
        end = max(end, last)


def _check_times(log: _Log, add: Add) -> None:
    """A batch that is delivered has the time at which the broker appended it, if that sets it."""
    for base, (outcome, path, time) in log.times.items():
        header, batch = log.batches.get(base, (None, b""))
        if header is not None and len(batch) >= BATCH_HEADER_SIZE and has_append_time(batch):
            if time != max_timestamp(batch):
                note = "the batch is delivered with this time"
                add(outcome, path, max_timestamp(batch), time, note)


def _transactions(log: _Log) -> tuple[list[tuple[int, int, int]], set[tuple[int, int]]]:
    """Aborted transactions as (producer id, first offset, marker's offset), and committed ones as
    (producer id, first offset), of those that are known from first batch to marker."""
    ranges = merged_ranges(
        (batch.base_offset, batch.last_offset) for batch, _ in log.batches.values()
    )
    starts = [first for first, _ in ranges]
    open_since: dict[int, int] = {}
    aborted, committed = [], set()
    for base in sorted(log.batches):
        batch, data = log.batches[base]
        if not batch.is_transactional:
            continue
        if not batch.is_control:
            open_since.setdefault(batch.producer_id, base)
            continue
        first = open_since.pop(batch.producer_id, -1)
        if first < 0 or ranges[bisect_right(starts, first) - 1][1] < base:
            continue  # its marker may be one that no answer brought
        if is_abort_marker(data):
            aborted.append((batch.producer_id, first, base))
        else:
            committed.add((batch.producer_id, first))
    return aborted, committed


class _StableFloors:
    """The least last stable offset beside each high watermark of a log: the first offset of a
    transaction that no known marker before the watermark ends.

    bases: of all batches, ascending. open_since: after each batch, that offset; None without an
    open transaction. Both end before the first batch without a known header.
    """

    def __init__(self, log: _Log) -> None:
        self.bases: list[int] = []
        self.open_since: list[int | None] = []
        self.known_end = FOREVER_NS  # the first batch without a known header
        if log.unknown_records or 0 not in log.acknowledged:
            self.known_end = -1
            return
        batches = {base: next(headers(data), None) for base, data in log.acknowledged.items()}
        batches |= {base: header for base, (header, _) in log.batches.items()}
        first_of: dict[int, int] = {}  # producer id -> offset, in order of offsets
        for base in sorted(batches):
            batch = batches[base]
            if batch is None:
                self.known_end = base
                break
            if batch.is_control:
                first_of.pop(batch.producer_id, None)
            elif batch.is_transactional:
                first_of.setdefault(batch.producer_id, base)
            self.bases.append(base)
            self.open_since.append(next(iter(first_of.values()), None))

    def at(self, watermark: int) -> int:
        """-1 if not all records before the watermark are known."""
        if watermark > self.known_end:
            return -1
        place = bisect_left(self.bases, watermark) - 1
        since = self.open_since[place] if place >= 0 else None
        return watermark if since is None else since


def _check_aborted(
    fetched: _Fetched,
    aborted: Sequence[tuple[int, int, int]],
    committed: set[tuple[int, int]],
    log: _Log,
    add: Add,
) -> None:
    if not fetched.is_committed:
        return
    path, name = f"{fetched.path}.aborted_transactions", "aborted_transactions"
    if fetched.batches and fetched.body.get(name, ()) is None:
        add(fetched.outcome, path, "a list", "null", "read_committed answers have one")
    rows = entries(fetched.body.get(name))
    listed = {(each["producer_id"], each["first_offset"]) for each in rows}
    if len(listed) < len(rows):
        add(fetched.outcome, path, "each once", "one twice", "a transaction is listed twice")
    for producer_id, first, marker in aborted:
        has_data = any(
            each.producer_id == producer_id
            and not each.is_control
            and first <= each.base_offset < marker
            for each in fetched.batches
        )
        if has_data and (producer_id, first) not in listed:
            name = f"producer {producer_id} from offset {first}"
            add(fetched.outcome, path, name, "not listed", "its records are here, and were aborted")
    for producer_id, first in listed:
        known = log.batches.get(first)
        is_other = known is not None and known[0].producer_id != producer_id
        if (producer_id, first) in committed or is_other:
            name = f"producer {producer_id} from offset {first}"
            add(fetched.outcome, path, "not listed", name, "no such transaction was aborted")

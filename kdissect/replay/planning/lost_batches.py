"""Leaves out batches of Produce requests with acks 0 that the captured broker did not write.

The first requests for a new topic may reach its broker before the partition is there. A broker
answers no request with acks 0: it closes the connection, and requests that follow on it are lost
as well. A target whose topics are ready would write these records, and all later offsets of the
partition would differ.

A batch is lost if all of these are true, so that nothing else explains the capture:

- no answer of the broker about the partition came before, without an error; or an earlier request
  of the connection was lost
- no request of the connection after this one was answered
- no answer to Fetch has the batch
- a later answer states the log end, and below that no gap between records of other requests is
  large enough for the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from kdissect.codec.message import Message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batch_headers import headers
from kdissect.replay.model import Exchange, WorkloadFacts
from kdissect.replay.planning.refused_batches import without_partitions
from kdissect.replay.workload.messages import entries, request_of, response_of

_Log = tuple[str, int]
_LATEST = -1
# The header of a batch from its CRC on; a broker sets only the offset and the leader epoch before.
_SEALED = slice(17, 61)
_APIS = frozenset({ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.LIST_OFFSETS})


@dataclass(slots=True)
class _SilentLog:
    """What answers show of a log. taken: (first, end) offsets of records. batches: headers of those
    that answers to Fetch have. ends: (sent_ns, offset)."""

    ready_ns: int = 1 << 62  # when an answer about it first has no error
    taken: list[tuple[int, int]] = field(default_factory=list)
    batches: set[bytes] = field(default_factory=set)
    ends: list[tuple[int, int]] = field(default_factory=list)

    def has_room(self, count: int, after_ns: int) -> bool:
        """Return whether so many records may be there without being in `taken`."""
        end = max((offset for sent_ns, offset in self.ends if sent_ns > after_ns), default=-1)
        at = 0
        for first, behind in sorted(self.taken):
            if first - at >= count:
                return True
            at = max(at, behind)
        return end < 0 or end - at >= count


class LostBatches:
    """Requests with acks 0 of a workload, and what its answers show of their logs."""

    def __init__(self, exchanges: Iterable[Exchange], facts: WorkloadFacts) -> None:
        self._names = {
            UUID(topic_id): topic.name
            for topic in facts.topics.values()
            for topic_id in topic.topic_ids
        }
        self._logs: dict[_Log, _SilentLog] = defaultdict(_SilentLog)
        self._answered: dict[int, int] = {}  # connection -> index of the last answered request
        self._lossy: set[int] = set()  # connections
        exchanges = [each for each in exchanges if not each.internal_reason]
        if any(_is_silent(each) for each in exchanges):
            for exchange in exchanges:
                self._read(exchange)

    def _read(self, exchange: Exchange) -> None:
        if exchange.response_time_ns >= 0:
            last = self._answered.get(exchange.connection, -1)
            self._answered[exchange.connection] = max(last, exchange.index)
        if exchange.api_key not in _APIS:
            return
        request, response = request_of(exchange), response_of(exchange)
        if request is None or response is None:
            return
        if exchange.api_key == ApiKey.PRODUCE:
            self._read_produce(request, response, exchange)
        elif exchange.api_key == ApiKey.FETCH:
            self._read_fetch(response, exchange)
        else:
            self._read_list_offsets(request, response, exchange)

    def _ready(self, name: str, partition: int, exchange: Exchange) -> _SilentLog:
        log = self._logs[name, partition]
        log.ready_ns = min(log.ready_ns, exchange.response_time_ns)
        return log

    def _read_produce(self, request: Message, response: Message, exchange: Exchange) -> None:
        counts = {
            log: _count(partition["records"])
            for log, partition in self._partitions(request.body["topic_data"], "partition_data")
        }
        answered = self._partitions(response.body["responses"], "partition_responses")
        for (name, number), partition in answered:
            first = partition["base_offset"]
            if not partition["error_code"] and first >= 0:
                log = self._ready(name, number, exchange)
                log.taken.append((first, first + counts.get((name, number), 0)))

    def _read_fetch(self, response: Message, exchange: Exchange) -> None:
        for (name, number), partition in self._partitions(response.body["responses"], "partitions"):
            if partition["error_code"]:
                continue
            log, data = self._ready(name, number, exchange), partition["records"] or b""
            log.ends.append((exchange.request_time_ns, partition["high_watermark"]))
            for each in headers(data):
                if not each.is_partial:
                    log.taken.append((each.base_offset, each.last_offset + 1))
                    log.batches.add(data[each.pos : each.pos + each.size][_SEALED])

    def _read_list_offsets(self, request: Message, response: Message, exchange: Exchange) -> None:
        wanted = {
            log: partition["timestamp"]
            for log, partition in self._partitions(request.body["topics"], "partitions")
        }
        for (name, number), partition in self._partitions(response.body["topics"], "partitions"):
            if not partition["error_code"]:
                log, offset = self._ready(name, number, exchange), partition.get("offset", -1)
                if wanted.get((name, number)) == _LATEST and offset >= 0:
                    log.ends.append((exchange.request_time_ns, offset))

    def _partitions(self, topics: Any, field_name: str) -> Iterator[tuple[_Log, dict[str, Any]]]:
        for topic in entries(topics):
            name = self._name(topic)
            for partition in entries(topic[field_name]):
                number = partition.get("index", partition.get("partition_index", -1))
                yield (name, number), partition

    def _name(self, topic: Mapping[str, Any]) -> str:
        topic_id = topic.get("topic_id")
        name = topic.get("name") or topic.get("topic")
        return name or str(self._names.get(topic_id or UUID(int=0), topic_id))

    def without_lost(self, exchange: Exchange) -> tuple[Exchange | None, int]:
        """An exchange without its lost batches (None if no other is left), and how many logs those
        are of. Exchanges of a connection come in their order."""
        request = request_of(exchange) if _is_silent(exchange) else None
        if request is None or self._answered.get(exchange.connection, -1) > exchange.index:
            return exchange, 0
        partitions = dict(self._partitions(request.body["topic_data"], "partition_data"))
        lost = {
            log for log, each in partitions.items() if self._is_lost(exchange, log, each["records"])
        }
        if lost:
            self._lossy.add(exchange.connection)
        if len(lost) in (0, len(partitions)):
            return None if lost else exchange, len(lost)

        def is_kept(topic: Mapping[str, Any], number: int) -> bool:
            return (self._name(topic), number) not in lost

        shorter = without_partitions(request, ("topic_data", "partition_data"), is_kept)
        return replace(exchange, request=shorter), len(lost)

    def _is_lost(self, exchange: Exchange, key: _Log, data: bytes | None) -> bool:
        log, data, count = self._logs.get(key), data or b"", _count(data)
        if log is None or not count:
            return False
        is_early = exchange.request_time_ns < log.ready_ns
        if not is_early and exchange.connection not in self._lossy:
            return False
        batches = (data[each.pos : each.pos + each.size] for each in headers(data))
        if any(each[_SEALED] in log.batches for each in batches):
            return False
        return not log.has_room(count, exchange.request_end_time_ns)


def _is_silent(exchange: Exchange) -> bool:
    return exchange.api_key == ApiKey.PRODUCE and not exchange.expects_response


def _count(data: bytes | None) -> int:
    return sum(max(each.record_count, 0) for each in headers(data or b""))

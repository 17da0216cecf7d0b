"""Lies that users would care about, each a change of an API's answers.

A lie changes one field, or the records, of one API: in all answers, or in the first one that has
room for it. A code that Kafka's clients answer by asking again is a lie only if it stays.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import crc32c

from kdissect.codec.message import Message
from kdissect.codec.record_encoder import encode_batch
from kdissect.replay.batches import Batch, batches_of
from tests.oracles.message_fields import holders

# -- records ------------------------------------------------------------------------------------

_CRC_FROM = 21
_CODECS, _CONTROL = 7, 32


def _only(condition: bool, value: Any) -> Any:
    if not condition:
        raise ValueError
    return value


def _batches(data: bytes) -> list[bytes]:
    found = batches_of(data)
    return _only(
        bool(found) and all(each.header.magic == 2 for each in found), [each.data for each in found]
    )


def _has(batch: bytes, attributes: int) -> bool:
    return bool(int.from_bytes(batch[21:23], "big") & attributes)


def _sealed(batch: bytearray) -> bytes:
    batch[17:21] = crc32c.crc32c(bytes(batch[_CRC_FROM:])).to_bytes(4, "big")
    return bytes(batch)


def _two_records_lost(data: bytes) -> bytes:
    """From the middle of each batch that has four."""
    made = b"".join(map(_shorter, batches_of(data)))
    return _only(made != b"".join(_batches(data)), made)


def _shorter(batch: Batch) -> bytes:
    header, rows = batch.header, list(batch.rows().values())
    if len(rows) < 4 or _has(batch.data, _CODECS | _CONTROL):
        return batch.data
    return encode_batch(
        [rows[0], *rows[3:]], base_offset=header.base_offset, last_offset=header.last_offset,
        producer_id=header.producer_id, producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence, is_transactional=header.is_transactional,
    )  # fmt: skip


def _value_changed(data: bytes) -> bytes:
    """The last byte of the first batch's last record."""
    first, *rest = _batches(data)
    made = bytearray(_only(not _has(first, _CODECS | _CONTROL), first))
    made[-3] ^= 1
    return _sealed(made) + b"".join(rest)


def _header_changed(at: int, bit: int = 1) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        first, *rest = _batches(data)
        made = bytearray(_only(not _has(first, _CONTROL), first))
        made[at] ^= bit
        return _sealed(made) + b"".join(rest)

    return change


def _wrong_crc(data: bytes) -> bytes:
    first, *rest = _batches(data)
    made = bytearray(first)
    made[17] ^= 1
    return bytes(made) + b"".join(rest)


def _lost(which: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        found = _batches(data)
        _only(bool(found), None)
        found.pop(which)
        return b"".join(found)

    return change


def _markers_lost(data: bytes) -> bytes:
    found = _batches(data)
    kept = [each for each in found if not _has(each, _CONTROL)]
    return _only(len(kept) < len(found), b"".join(kept))


def _swapped(data: bytes) -> bytes:
    first, second, *rest = _only(len(_batches(data)) > 1, _batches(data))
    return second + first + b"".join(rest)


RECORD_KINDS: dict[str, Callable[[bytes], bytes]] = {
    "two records lost": _two_records_lost,
    "value changed": _value_changed,
    "timestamp changed": _header_changed(34),
    "made a control batch": _header_changed(22, _CONTROL),
    "wrong CRC": _wrong_crc,
    "first batch lost": _lost(0),
    "last batch lost": _lost(-1),
    "middle batch lost": lambda data: _lost(1)(_only(len(_batches(data)) > 2, data)),
    "batch doubled": lambda data: data + _batches(data)[-1],
    "batches swapped": _swapped,
    "markers lost": _markers_lost,
    "all lost": lambda data: _only(bool(_batches(data)), b""),
}
"""Kind -> record data of a partition to another one, with right checksums but for "wrong CRC".
ValueError if the data has no room for it."""

# -- fields -------------------------------------------------------------------------------------


def _code(number: int) -> Callable[[Any], Any]:
    return lambda value: number if value == 0 else value


def _plus(number: int) -> Callable[[Any], Any]:
    return lambda value: value + number if value >= 0 else value


def _text(text: str) -> Callable[[Any], Any]:
    return lambda value: text if value else value


# codes that Kafka's clients answer by asking again
STAYING: dict[str, Callable[[Any], Any]] = {
    "UNKNOWN_TOPIC_OR_PARTITION": _code(3),
    "LEADER_NOT_AVAILABLE": _code(5),
    "NOT_LEADER_OR_FOLLOWER": _code(6),
    "COORDINATOR_LOAD_IN_PROGRESS": _code(14),
    "NOT_COORDINATOR": _code(16),
    "NOT_ENOUGH_REPLICAS": _code(19),
    "REBALANCE_IN_PROGRESS": _code(27),
    "CONCURRENT_TRANSACTIONS": _code(51),
    "UNSTABLE_OFFSET_COMMIT": _code(88),
}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "error": _code(-1),
    "no error": lambda value: 0,
    "plus 1": _plus(1),
    "plus 5000": _plus(5000),
    "zero": lambda value: min(value, 0),
    "none": lambda value: -1 if value >= 0 else value,
    "shortened": lambda value: value[:-1],
    "emptied": lambda value: value[:0],
    "doubled": lambda value: value + value[-1:],
    "other text": lambda value: f"{value}-x" if value else value,
    "Ongoing": _text("Ongoing"),
    "Dead": _text("Dead"),
    **STAYING,
}

OFFSET, LIST = ("plus 1", "plus 5000", "zero"), ("shortened", "emptied")
CODE = ("error", "no error")
SEVERAL = {"OFFSET": OFFSET, "LIST": LIST, "CODE": CODE, "RECORDS": tuple(RECORD_KINDS)}
SEVERAL["TXN"] = (*CODE, "CONCURRENT_TRANSACTIONS")
SEVERAL |= {"LEADER": ("NOT_LEADER_OR_FOLLOWER",), "LOADING": ("COORDINATOR_LOAD_IN_PROGRESS",)}
# APIs and a field of their answers: kinds of lies about it
CARED = """
Produce responses[].partition_responses[].error_code: CODE, LEADER, NOT_ENOUGH_REPLICAS
Produce responses[].partition_responses[].base_offset: OFFSET
Produce responses[].partition_responses: LIST
Fetch ShareFetch responses[].partitions[].records: RECORDS
Fetch responses[].partitions[].error_code: CODE, LEADER, UNKNOWN_TOPIC_OR_PARTITION
Fetch responses[].partitions[].high_watermark: OFFSET
Fetch responses[].partitions[].aborted_transactions: emptied
Fetch error_code: CODE
ListOffsets topics[].partitions[].offset: OFFSET
ListOffsets topics[].partitions[].error_code: CODE, LEADER
ListOffsets topics[].partitions: LIST
Metadata topics[].error_code: CODE, UNKNOWN_TOPIC_OR_PARTITION, LEADER_NOT_AVAILABLE
Metadata topics[].partitions[].error_code: CODE, LEADER_NOT_AVAILABLE
Metadata topics[].partitions[].leader_id: none
Metadata topics: LIST
Metadata topics[].partitions: LIST
DescribeTopicPartitions CreateTopics topics[].error_code: CODE
DescribeTopicPartitions topics[].partitions: LIST
OffsetCommit topics[].partitions[].error_code: CODE, REBALANCE_IN_PROGRESS, LOADING
OffsetFetch topics[].partitions[].committed_offset: OFFSET
OffsetFetch topics[].partitions[].metadata: other text
OffsetFetch groups[].topics[].partitions[].committed_offset: OFFSET
OffsetFetch groups[].topics: LIST
OffsetFetch groups[].error_code: error, LOADING
OffsetFetch JoinGroup ConsumerGroupHeartbeat error_code: CODE, LOADING
FindCoordinator error_code: error, LOADING
FindCoordinator coordinators[].error_code: error, LOADING
JoinGroup protocol_name: other text
JoinGroup members: shortened
JoinGroup leader: other text
SyncGroup error_code: CODE, REBALANCE_IN_PROGRESS
SyncGroup assignment: emptied
Heartbeat error_code: error, REBALANCE_IN_PROGRESS, NOT_COORDINATOR
LeaveGroup error_code: CODE
LeaveGroup members[].error_code: CODE
ConsumerGroupHeartbeat ShareGroupHeartbeat assignment.topic_partitions: LIST
ConsumerGroupDescribe groups[].error_code: CODE
ConsumerGroupDescribe groups[].members: LIST
DescribeGroups groups[].error_code: CODE
DescribeGroups groups[].group_state: other text, Dead
DescribeGroups groups[].members: LIST
ListGroups error_code: CODE
ListGroups groups: LIST
DeleteGroups CreatePartitions DescribeConfigs CreateAcls results[].error_code: CODE
CreateTopics topics[].num_partitions: plus 1
DeleteTopics AlterConfigs IncrementalAlterConfigs responses[].error_code: CODE
DeleteRecords topics[].partitions[].error_code: CODE
DeleteRecords topics[].partitions[].low_watermark: OFFSET
InitProducerId AddOffsetsToTxn EndTxn error_code: TXN
AddPartitionsToTxn results_by_topic_v3_and_below[].results_by_partition[].partition_error_code: TXN
TxnOffsetCommit topics[].partitions[].error_code: CODE, LOADING
DescribeTransactions ListTransactions transaction_states[].transaction_state: Ongoing
DescribeTransactions transaction_states[].error_code: CODE
ListTransactions transaction_states: LIST
DescribeConfigs results[].configs[].value: other text
DescribeConfigs results[].configs: LIST
DescribeAcls error_code: CODE
DescribeAcls resources: LIST
ShareFetch responses[].partitions[].error_code: CODE
ShareFetch responses[].partitions[].acknowledge_error_code: CODE
ShareAcknowledge responses[].partitions[].error_code: CODE
ShareGroupHeartbeat error_code: CODE
"""


class Lie(NamedTuple):
    """One change of an API's answers. is_once: in the first answer with room only."""

    api: str
    path: str
    kind: str
    is_once: bool

    def __str__(self) -> str:
        return f"{self.api} {self.path} {self.kind}{' once' * self.is_once}"


def lies() -> Iterator[Lie]:
    for line in CARED.strip().splitlines():
        place, _, words = line.partition(": ")
        *apis, path = place.split()
        kinds = [kind for word in words.split(", ") for kind in SEVERAL.get(word, (word,))]
        for api, kind in product(apis, kinds):
            yield Lie(api, path, kind, False)
            if kind not in STAYING:
                yield Lie(api, path, kind, True)


class Liar:
    """Changes answers in place, from any thread. count: changed answers."""

    def __init__(self, lie: Lie) -> None:
        self.lie, self.count = lie, 0
        self._lock = threading.Lock()

    def __call__(self, message: Message) -> bool:
        """Whether the answer was changed."""
        with self._lock:
            if message.api_name != self.lie.api or (self.lie.is_once and self.count):
                return False
            is_changed = self._change(message)
            self.count += is_changed
            return is_changed

    def _change(self, message: Message) -> bool:
        change = {**CHANGES, **RECORD_KINDS}[self.lie.kind]
        before = copy.deepcopy(message.body)
        for holder, name in holders(message.body, self.lie.path.replace("[]", "")):
            value = holder[name]
            if value is None:
                continue
            try:
                holder[name] = change(value)
            except ValueError:
                continue  # no room in these records
            if self.lie.is_once and holder[name] != value:
                break
        return message.body != before

"""Answers for a server that stands for a cluster: a capture's, in the terms of another one.

A request that a replay sends in the terms of that cluster gets the captured answer to it, in the
same terms: topic ids, producer ids and fetch sessions are others, and have to be translated.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import Any
from uuid import UUID

from kdissect.codec.message import Message, encode_message
from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.batch_headers import headers, is_sealed, patch_producer
from kdissect.replay.fields import FieldKind, iter_fields
from kdissect.replay.model import Workload
from kdissect.replay.workload.messages import request_of, response_of

_TOPIC_ID = 0xABCDEF << 40
_PRODUCER, _SESSION = 1000, 5


def key_of(frame: bytes) -> bytes:
    """A request without its correlation id."""
    return frame[:4] + frame[8:]


class Answers:
    """frames: `key_of` a request -> the answers that are left, at least one, in captured order,
    empty where none is due. topics: what Metadata tells, by name."""

    def __init__(self, workload: Workload) -> None:
        self.frames: dict[bytes, deque[bytes]] = {}
        self.topics: dict[str, dict[str, Any]] = {}
        for exchange in sorted(workload.exchanges(), key=lambda it: it.request_time_ns):
            if exchange.request is None or exchange.internal_reason:
                continue
            if exchange.response is None and exchange.expects_response:
                continue
            request, response = request_of(exchange), response_of(exchange)
            sent, came = exchange.request, exchange.response or b""
            if request is not None and request.api_key != ApiKey.API_VERSIONS:
                sent = _moved(request)
                came = _moved(response) if response is not None else came
            self.frames.setdefault(key_of(sent), deque()).append(came)
        for name, topic in workload.facts.topics.items():
            if topic.is_internal or not topic.topic_ids:
                continue
            self.topics[name] = {
                "name": name,
                "topic_id": _topic_id(UUID(topic.topic_ids[-1])),
                "partitions": [
                    {"partition_index": n, "leader_id": 1, "leader_epoch": 0, "replica_nodes": [1]}
                    for n in range(topic.partition_count)
                ],
            }

    def take(self, frame: bytes) -> bytes | None:
        """The next answer to a request, the last one again and again; None where the capture has
        none."""
        left = self.frames.get(key_of(frame))
        if not left:
            return None
        return left.popleft() if len(left) > 1 else left[0]


def _topic_id(value: UUID) -> UUID:
    return UUID(int=value.int ^ _TOPIC_ID) if value.int else value


def _moved(message: Message) -> bytes:
    message = copy.deepcopy(message)
    for kind, slot, holder, _ in list(iter_fields(message)):
        value = holder[slot.name]
        if kind is FieldKind.TOPIC_ID:
            many = isinstance(value, list)
            holder[slot.name] = [_topic_id(it) for it in value] if many else _topic_id(value)
        elif kind is FieldKind.PRODUCER_ID and not isinstance(value, list) and value >= 0:
            holder[slot.name] = value + _PRODUCER
        elif kind is FieldKind.RECORDS:
            holder[slot.name] = _records(value)
    if message.api_key == ApiKey.FETCH and message.body.get("session_id"):
        message.body["session_id"] += _SESSION
    return encode_message(message)


def _records(data: bytes) -> bytes:
    out = bytearray(data)
    for header in headers(data):
        if header.magic == 2 and header.producer_id >= 0 and not header.is_partial:
            patch_producer(
                out, header, header.producer_id + _PRODUCER, header.producer_epoch,
                header.base_sequence, seal=is_sealed(data, header),
            )  # fmt: skip
    return bytes(out)

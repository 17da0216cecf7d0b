"""Waits until the target shows a change everywhere, with requests of the replay's own.

A controller answers a change of metadata as soon as its quorum has it. Brokers apply it some time
later, and a coordinator ends a transaction some time after its answer. Reads that come in between
show the state before. Each wait here has a time limit, and returns whether the target has settled
within it. If it has not, the answer to the next request shows what is missing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.target.cluster import EARLIEST, Target
from kdissect.replay.target.connection import ConnectFailed
from kdissect.replay.workload.messages import GROUP_KEY, TRANSACTION_KEY

SETTLE_S = 10.0
_PAUSES_S = (0.01, 0.02, 0.05)  # the last one again and again
_METADATA_TOPIC = "__cluster_metadata"
_UNKNOWN = 1 << 62  # as far as any
ENDING = frozenset({"PrepareCommit", "PrepareAbort", "PrepareEpochFence"})
_OPEN = ENDING | {"Ongoing"}
_NO_MEMBERS = frozenset({"Empty", "Dead"})


async def tries(limit_s: float) -> AsyncIterator[None]:
    """Yield again and again, after pauses, until the time is over."""
    loop = asyncio.get_running_loop()
    end, count = loop.time() + limit_s, 0
    while loop.time() < end:
        yield
        await asyncio.sleep(_PAUSES_S[min(count, len(_PAUSES_S) - 1)])
        count += 1


async def await_metadata(target: Target, limit_s: float, *, all_parts: bool) -> bool:
    """Wait until each broker has the metadata log as far as the quorum has it now.

    In a KRaft cluster, the epoch of the finalized features (KIP-584) is the offset of the metadata
    that a broker has. all_parts: wait until all its parts have applied it, such as its authorizer:
    only then it begins with the next batch, and an idle controller writes one every half second.
    Brokers with ZooKeeper do not say how far they are.
    """
    with suppress(ConnectFailed):
        end = await _quorum_end(target) - (not all_parts)
        behind = list(target.nodes) if end > 0 else []
        async for _ in tries(limit_s):
            behind = [each for each in behind if await _applied_offset(target, each) < end]
            if not behind:
                return True
    return False


async def _quorum_end(target: Target) -> int:
    """The high watermark of the metadata log; -1 if the target does not say."""
    version = target.newest(ApiKey.DESCRIBE_QUORUM)
    if version is None:
        return -1
    topic = {"topic_name": _METADATA_TOPIC, "partitions": [{"partition_index": 0}]}
    body = (await target.ask(ApiKey.DESCRIBE_QUORUM, version, {"topics": [topic]})).body
    partitions = [each for topic in body["topics"] for each in topic["partitions"]]
    if body["error_code"] or not partitions or partitions[0]["error_code"]:
        return -1
    return int(partitions[0]["high_watermark"])


async def _applied_offset(target: Target, node_id: int) -> int:
    """The offset of the metadata that a broker has; that of a broker that is gone does not
    matter."""
    try:
        answer = await target.ask_versions(node_id)
    except ConnectFailed:
        return _UNKNOWN
    offset = int(answer.body.get("finalized_features_epoch", -1))
    return offset if offset >= 0 else _UNKNOWN


async def await_partitions(
    target: Target, counts: Mapping[str, int], limit_s: float = SETTLE_S
) -> bool:
    """Wait until the leaders of topics serve all partitions.

    Metadata lists new partitions before their leaders accept requests. counts: the least number of
    partitions of each topic.
    """
    with suppress(ConnectFailed):
        async for _ in tries(limit_s):
            body = await target.learn_metadata(None)
            listed = {topic["name"]: len(topic["partitions"]) for topic in body["topics"]}
            served = Counter(name for name, _ in await target.log_offsets(counts, EARLIEST))
            if all(served[name] >= max(n, listed.get(name, 0)) for name, n in counts.items()):
                return True
    return False


async def await_transaction(
    target: Target, transactional_id: str, limit_s: float, *, is_ending: bool
) -> bool:
    """Wait until a transaction has its markers in all partitions.

    is_ending: its coordinator has begun to end it; otherwise it is open, and times out.
    Coordinators before Kafka 3.0 do not say so (KIP-664).
    """
    if target.newest(ApiKey.DESCRIBE_TRANSACTIONS) is None:
        return True
    with suppress(ConnectFailed):
        async for state in transaction_states(target, transactional_id, limit_s):
            if state not in (ENDING if is_ending else _OPEN):
                return True
    return False


async def transaction_states(
    target: Target, transactional_id: str, limit_s: float
) -> AsyncIterator[str]:
    """The state of a transactional id again and again, until the time is over; "" if its
    coordinator does not know it. Raises ConnectFailed."""
    version = target.version(ApiKey.DESCRIBE_TRANSACTIONS)
    node_id = await target.coordinator(TRANSACTION_KEY, transactional_id)
    asked = {"transactional_ids": [transactional_id]}
    async for _ in tries(limit_s):
        answer = await target.ask(ApiKey.DESCRIBE_TRANSACTIONS, version, asked, node_id)
        found = [each for each in answer.body["transaction_states"] if not each["error_code"]]
        yield found[0]["transaction_state"] if found else ""


async def await_empty_group(target: Target, group: str, limit_s: float) -> bool:
    """Wait until a group has no members."""
    version = target.newest(ApiKey.DESCRIBE_GROUPS)
    if version is None:
        return True
    with suppress(ConnectFailed):
        node_id = await target.coordinator(GROUP_KEY, group)
        async for _ in tries(limit_s):
            answer = await target.ask(ApiKey.DESCRIBE_GROUPS, version, {"groups": [group]}, node_id)
            if {each["group_state"] for each in answer.body["groups"]} <= _NO_MEMBERS:
                return True
    return False

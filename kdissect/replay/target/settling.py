"""Waits until the target shows a change everywhere, with requests of the replay's own.

A controller answers a change of metadata as soon as its quorum has it. Brokers apply it some time
later, and a coordinator ends a transaction some time after its answer. Reads that come in between
show the state before. Each wait here has a time limit and raises no error at its end: the answer to
the next request then shows what is missing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

from kdissect.protocol.api_keys import ApiKey
from kdissect.replay.target.cluster import EARLIEST, Target
from kdissect.replay.target.connection import ConnectFailed

SETTLE_S = 10.0
_PAUSES_S = (0.01, 0.02, 0.05)  # the last one again and again
_BATCH_S = 3.0
_METADATA_TOPIC = "__cluster_metadata"
_ENDING = frozenset({"PrepareCommit", "PrepareAbort", "PrepareEpochFence"})


async def _tries(limit_s: float = SETTLE_S) -> AsyncIterator[None]:
    """Yield again and again, after pauses, until the time is over."""
    loop = asyncio.get_running_loop()
    end, count = loop.time() + limit_s, 0
    while loop.time() < end:
        yield
        await asyncio.sleep(_PAUSES_S[min(count, len(_PAUSES_S) - 1)])
        count += 1


async def await_metadata(target: Target) -> None:
    """Wait until each broker has applied the metadata log as far as the quorum has it now.

    In a KRaft cluster, the epoch of the finalized features (KIP-584) is the offset of the metadata
    that a broker has. It begins to apply the next batch when all its parts have applied this one,
    and an idle controller writes a batch every half second. Brokers with ZooKeeper do not say how
    far they are.
    """
    with suppress(ConnectFailed):
        end = await _quorum_end(target)
        for node_id in list(target.nodes) if end >= 0 else ():
            async for _ in _tries(_BATCH_S):
                if await _applied_offset(target, node_id) >= end:
                    break


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
    """The offset of the metadata that a broker has applied, or one that any has if it is gone."""
    try:
        answer = await target.ask_versions(node_id)
    except ConnectFailed:
        return 1 << 62
    return int(answer.body.get("finalized_features_epoch", 1 << 62))


async def await_partitions(target: Target, counts: Mapping[str, int]) -> bool:
    """Wait until the leaders of topics serve all partitions; return False if they do not.

    Metadata lists new partitions before their leaders accept requests. counts: the least number of
    partitions of each topic.
    """
    with suppress(ConnectFailed):
        async for _ in _tries():
            body = await target.learn_metadata(None)
            listed = {topic["name"]: len(topic["partitions"]) for topic in body["topics"]}
            served = Counter(name for name, _ in await target.log_offsets(counts, EARLIEST))
            if all(served[name] >= max(n, listed.get(name, 0)) for name, n in counts.items()):
                return True
    return False


async def await_transaction(target: Target, transactional_id: str, node_id: int | None) -> None:
    """Wait until a transaction that is being ended has its markers in all partitions.

    node_id: of its coordinator. Coordinators before Kafka 3.0 do not say so (KIP-664).
    """
    version = target.newest(ApiKey.DESCRIBE_TRANSACTIONS)
    if version is None:
        return
    asked = {"transactional_ids": [transactional_id]}
    with suppress(ConnectFailed):
        async for _ in _tries():
            answer = await target.ask(ApiKey.DESCRIBE_TRANSACTIONS, version, asked, node_id)
            states = {each["transaction_state"] for each in answer.body["transaction_states"]}
            if not states & _ENDING:
                return

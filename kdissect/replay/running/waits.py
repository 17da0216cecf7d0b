"""What a step may have to wait for at the target, asked beside the workload: a topic that nothing
is known of, partitions that are not served yet, a transaction that has yet to run out of time.

All of it ends after a while without complaint: then the steps themselves tell.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kdissect.errors import EnvironmentFailed
from kdissect.replay.model import Step, Translation
from kdissect.replay.target.cluster import Target
from kdissect.replay.target.connection import ConnectFailed

METADATA_PAUSES_S = (0.0, 0.05, 0.1, 0.2, 0.4)  # a topic just made takes a moment to be known
LEADER_PAUSES_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
EXPIRY_PAUSE_S, EXPIRY_S = 0.25, 90.0  # a transaction's own limit is 60 s by default


async def ask_metadata(target: Target, translation: Translation, names: list[str]) -> None:
    """Of topics that are unknown; asked a few times the first time they turn up."""
    for pause_s in METADATA_PAUSES_S:
        await asyncio.sleep(pause_s)
        try:
            body = await target.learn_metadata(names)
        except ConnectFailed:
            return
        translation.learn_metadata(body)
        if not any(topic["error_code"] for topic in body["topics"]):
            return


async def await_expiry(target: Target, translation: Translation, step: Step) -> None:
    """The transaction had run out of time when this was sent: so it shall have at the target,
    whose coordinator looks for such ones every few seconds."""
    name = translation.transactional_id(step.expired)
    loop = asyncio.get_running_loop()
    end = loop.time() + EXPIRY_S
    with suppress(ConnectFailed, EnvironmentFailed):
        while await target.has_open_transaction(name) and loop.time() < end:
            await asyncio.sleep(EXPIRY_PAUSE_S)


async def await_leaders(target: Target, translation: Translation) -> None:
    """Partitions just made are served some time after the answer; clients find that out by asking,
    which nothing shows that others wait for."""
    with suppress(ConnectFailed):
        for pause_s in LEADER_PAUSES_S:
            await asyncio.sleep(pause_s)
            if await target.is_serving():
                translation.learn_metadata(target.metadata)
                return

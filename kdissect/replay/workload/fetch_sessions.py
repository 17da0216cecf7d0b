"""The partitions of fetch sessions (KIP-227) and share sessions (KIP-932).

A request of a session names only the partitions that change. The broker takes the others from the
session's earlier requests.
"""

from __future__ import annotations

from itertools import islice
from uuid import UUID

from kdissect.replay.batches import headers
from kdissect.replay.model import Broker
from kdissect.replay.workload.messages import Body, entries, partitions

# The entry of each partition in a request, by the name or id of its topic, and its number.
Entries = dict[tuple[str | UUID, int], Body]
_BYTES = 1 << 20  # of a partition that no request names: the default of consumers


class FetchSessions:
    """The partitions of captured sessions, by broker and id: a client may go on with one over
    another connection. known: of those that began earlier."""

    def __init__(self, known: dict[tuple[Broker, int], Entries]) -> None:
        self.known = dict(known)

    def after(self, broker: Broker, request: Body, response: Body) -> Entries:
        """Add the next captured Fetch of a session, and return the partitions that it asks for.

        If the begin of the session was not captured, these are the partitions that captured
        requests of it have named so far, and those whose records captured responses have.
        response: empty if it was not captured; then the session goes on as the client asked.
        """
        session_id = request["session_id"] if request.get("session_epoch", -1) > 0 else 0
        known = self.known.get((broker, session_id), {})
        found = in_session(known, request)
        for topic, number, partition in partitions(response):
            for first in islice(headers(partition["records"] or b""), 1):
                at_first = {"partition": number, "fetch_offset": first.base_offset}
                found.setdefault((_key(topic), number), {**at_first, "partition_max_bytes": _BYTES})
        if session_id := response.get("session_id", session_id):
            self.known[broker, session_id] = found
        return found


def in_session(known: Entries, body: Body) -> Entries:
    """The partitions that a session has after a request: those that it names, and those that are
    known from earlier ones."""
    found = dict(known)
    for topic in entries(body.get("forgotten_topics_data")):
        for number in topic["partitions"]:
            found.pop((_key(topic), number), None)
    for topic, number, partition in partitions(body):
        found[_key(topic), number] = partition
    return found


def _key(topic: Body) -> str | UUID:
    key: str | UUID = topic["topic_id"] if "topic_id" in topic else topic["topic"]
    return key


def by_topic(found: Entries) -> list[Body]:
    """The structs of topics of a Fetch or ShareFetch with these partitions."""
    topics: dict[str | UUID, Body] = {}
    for (key, _), partition in found.items():
        name = "topic" if isinstance(key, str) else "topic_id"
        topic = topics.setdefault(key, {name: key, "partitions": []})
        topic["partitions"].append(dict(partition))
    return list(topics.values())

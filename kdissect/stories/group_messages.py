"""Events of groups from decoded messages that change something or are refused.

Array operations select these messages. The few that remain (joins, syncs, leaves, errors,
heartbeats with a new epoch or assignment) are read one by one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Ints
from kdissect.codec.message_codec import decode
from kdissect.errors import DecodeError
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.error_codes import error_name
from kdissect.protocol.model import REQUEST, RESPONSE
from kdissect.stories.events import event_table, place
from kdissect.tables.message_chunk import MessageChunk
from kdissect.tables.schemas import Row
from kdissect.tables.topics import TopicNames

EPOCH_HEARTBEATS = (
    ApiKey.CONSUMER_GROUP_HEARTBEAT,
    ApiKey.SHARE_GROUP_HEARTBEAT,
    ApiKey.STREAMS_GROUP_HEARTBEAT,
)
GROUP_APIS = (
    ApiKey.OFFSET_COMMIT,
    ApiKey.JOIN_GROUP,
    ApiKey.HEARTBEAT,
    ApiKey.LEAVE_GROUP,
    ApiKey.SYNC_GROUP,
    ApiKey.TXN_OFFSET_COMMIT,
    *EPOCH_HEARTBEATS,
)

Body = Row
GroupFacts = tuple[str | None, int | None, Body]  # member id, generation, other facts


def group_events(messages: MessageChunk) -> Iterator[pa.Table]:
    """GROUP_EVENT of a chunk."""
    for api_key in GROUP_APIS:
        rows = _notable(messages, api_key)
        if len(rows):
            yield _read(messages, api_key, rows)


def _notable(messages: MessageChunk, api_key: int) -> Ints:
    """Rows of the messages that change something or are refused."""
    rows = messages.rows(api_key)
    if not len(rows) or api_key in (ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP, ApiKey.LEAVE_GROUP):
        return rows
    wrong = messages.error_code[rows] != 0
    if api_key not in EPOCH_HEARTBEATS:
        return rows[wrong]
    request = messages.body(api_key, REQUEST, rows)
    response = messages.body(api_key, RESPONSE, rows)
    epoch = request.field("member_epoch").to_numpy(zero_copy_only=False)
    new = wrong | (epoch <= 0)
    there = response.is_valid().to_numpy(zero_copy_only=False)
    new_epoch = pc.fill_null(response.field("member_epoch"), 0).to_numpy(zero_copy_only=False)
    name = "active_tasks" if api_key == ApiKey.STREAMS_GROUP_HEARTBEAT else "assignment"
    assigned = response.field(name).is_valid().to_numpy(zero_copy_only=False)
    return rows[new | there & ((new_epoch != epoch) | assigned)]


def _read(messages: MessageChunk, api_key: int, rows: Ints) -> pa.Table:
    requests = messages.values(api_key, REQUEST, rows)
    responses = messages.values(api_key, RESPONSE, rows)
    picked: list[int] = []
    order: list[int] = []
    facts: list[GroupFacts] = []
    for at, (request, response) in enumerate(zip(requests, responses, strict=True)):
        for number, one in enumerate(_facts(api_key, request, response, messages.topic_names)):
            picked.append(at)
            order.append(number)
            facts.append(one)
    chosen = rows[np.array(picked, np.int64)]
    clients = messages.client_ids.take(pa.array(chosen))
    errors: pa.Array = messages.errors(api_key, chosen)
    # a single member's error in a batch of leaves
    own = [one[2].pop("error_code", None) for one in facts]
    return event_table(
        "groups",
        **place(messages, chosen, np.array(order, np.int64)),
        group_id=pa.array([requests[at]["group_id"] for at in picked], pa.string()),
        api_key=pa.array(np.full(len(chosen), api_key, np.int16)),
        client_id=clients.cast(pa.string()),
        member_id=pa.array([member for member, _, _ in facts], pa.string()),
        generation=pa.array([generation for _, generation, _ in facts], pa.int32()),
        error_code=pc.coalesce(pa.array(own, pa.int16()), errors),
        data=pa.array([json.dumps(data) for _, _, data in facts], pa.string()),
    )


def _facts(
    api_key: int, request: Body, response: Body | None, topic_names: TopicNames
) -> Iterator[GroupFacts]:
    if api_key == ApiKey.JOIN_GROUP:
        yield _join(request, response)
    elif api_key == ApiKey.SYNC_GROUP:
        yield _sync(request, response)
    elif api_key == ApiKey.LEAVE_GROUP:
        yield from _leaves(request, response)
    elif api_key == ApiKey.HEARTBEAT:
        yield request["member_id"], request["generation_id"], {}
    elif api_key in EPOCH_HEARTBEATS:
        yield _epoch_heartbeat(api_key, request, response, topic_names)
    else:
        name = (
            "generation_id_or_member_epoch" if api_key == ApiKey.OFFSET_COMMIT else "generation_id"
        )
        refused = {"refused": _refused(request, response, topic_names)}
        yield request["member_id"], request[name], refused


def _join(request: Body, response: Body | None) -> GroupFacts:
    data = {
        "asked_as": request["member_id"],
        "type": request["protocol_type"],
        "offered": [protocol["name"] for protocol in request["protocols"] or ()],
        "reason": request["reason"],
        "instance": request["group_instance_id"],
    }
    if response is None:
        return request["member_id"] or None, None, data
    data["protocol"] = response["protocol_name"]
    data["leader"] = response["leader"]
    data["members"] = [member["member_id"] for member in response["members"] or ()]
    return response["member_id"] or request["member_id"], response["generation_id"], data


def _sync(request: Body, response: Body | None) -> GroupFacts:
    data: Body = {"gives": [one["member_id"] for one in request["assignments"] or ()]}
    if response is not None:
        data["assigned"] = _assigned(request["protocol_type"], response["assignment"])
    return request["member_id"], request["generation_id"], data


def _leaves(request: Body, response: Body | None) -> Iterator[GroupFacts]:
    if request["members"] is None:
        yield request["member_id"], None, {"reason": None, "instance": None}
        return
    answers = (response and response["members"]) or []
    for number, member in enumerate(request["members"]):
        data = {"reason": member["reason"], "instance": member["group_instance_id"]}
        whole = response["error_code"] if response else 0
        if not whole and number < len(answers):
            data["error_code"] = answers[number]["error_code"]
        yield member["member_id"], None, data


def _epoch_heartbeat(
    api_key: int, request: Body, response: Body | None, topic_names: TopicNames
) -> GroupFacts:
    data: Body = {
        "epoch": request["member_epoch"],
        "instance": request.get("instance_id"),
        "subscribed": request.get("subscribed_topic_names"),
        "regex": request.get("subscribed_topic_regex"),
    }
    if response is None:
        return request["member_id"], request["member_epoch"], data
    data["message"] = response["error_message"]
    if api_key == ApiKey.STREAMS_GROUP_HEARTBEAT:
        if response["active_tasks"] is not None:
            data["given"] = _merged(
                (f"{kind} task {task['subtopology_id']}", task["partitions"])
                for kind in ("active", "standby", "warmup")
                for task in response[f"{kind}_tasks"] or ()
            )
    elif response["assignment"] is not None:
        data["given"] = _merged(
            (topic_names.name(item["topic_id"]), item["partitions"])
            for item in response["assignment"]["topic_partitions"] or ()
        )
    member = response["member_id"] or request["member_id"]
    epoch = request["member_epoch"] if response["error_code"] else response["member_epoch"]
    return member, epoch, data


def _refused(request: Body, response: Body | None, topic_names: TopicNames) -> str:
    """Text of the partitions of a commit that were refused, with their errors."""
    partitions_of: dict[int, list[tuple[str, list[int]]]] = {}
    for topic in (response and response["topics"]) or ():
        name = topic["name"]
        if name is None:
            name = topic_names.name(topic["topic_id"])
        for partition in topic["partitions"] or ():
            code = partition["error_code"]
            if code:
                partitions_of.setdefault(code, []).append((name, [partition["partition_index"]]))
    return "; ".join(
        f"{error_name(code)}: {places(_merged(some))}"
        for code, some in sorted(partitions_of.items())
    )


def _assigned(protocol_type: str | None, data: bytes | None) -> str:
    """A classic assignment as text; for protocols other than consumer's only its size."""
    if not data:
        return "nothing"
    if protocol_type in (None, "consumer", "stream"):
        definition = catalog.definition("ConsumerProtocolAssignment")
        last = definition.versions.last
        version = int.from_bytes(data[:2], "big", signed=True)
        if len(data) >= 2 and version >= 0:
            try:
                values, end = decode(definition, min(version, last), data, 2)
            except DecodeError:
                end, values = -1, {}
            if end == len(data) or (version > last and end > 0):
                given = values["assigned_partitions"] or ()
                return places(_merged((_text(item["topic"]), item["partitions"]) for item in given))
    return f"{len(data)} bytes"


def _text(name: str) -> str:
    """The name with U+FFFD for invalid UTF-8, which the decoder represents as surrogates."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


Places = dict[str, list[int]]  # partitions by topic, or by subtopology of tasks


def _merged(pairs: Iterable[tuple[str, list[int] | None]]) -> Places:
    """Each name once, in order, with its distinct partitions in order."""
    merged: dict[str, set[int]] = {}
    for name, partitions in pairs:
        merged.setdefault(name, set()).update(partitions or ())
    return {name: sorted(partitions) for name, partitions in sorted(merged.items())}


def places(given: Places) -> str:
    """``orders[0-2,5] payments[1]``: partitions as ranges."""
    return " ".join(f"{name}[{_ranges(parts)}]" for name, parts in given.items()) or "nothing"


def _ranges(numbers: list[int]) -> str:
    texts = []
    for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        listed = [number for _, number in run]
        first, last = listed[0], listed[-1]
        texts.append(str(first) if first == last else f"{first}-{last}")
    return ",".join(texts)

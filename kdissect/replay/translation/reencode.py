"""A request in another version: the nearest that the target speaks (``--reencode``).

Fields that both versions have keep their values; new ones get their defaults. A field that the
other version lacks is dropped. If its value is not its default, the request means something else
without it: `DROPPABLE` names the fields that may go all the same, and each of them is noted; any
other makes the request untranslatable. Two things are converted: topics by name or by id, and
messages of a format that newer versions no longer take.
"""

from __future__ import annotations

from dataclasses import replace

from kdissect.codec.message import Message
from kdissect.codec.message_codec import UNKNOWN_TAGS
from kdissect.codec.record_batches import decode_record_set
from kdissect.codec.record_encoder import encode_batch
from kdissect.codec.redaction import is_secret
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.layout import Layout, layout
from kdissect.replay.model import ABSENT, Difference, Untranslatable
from kdissect.replay.translation.id_map import ZERO_UUID, IdMap
from kdissect.replay.workload.messages import Body, entries

_MAGIC_2_SINCE = 3  # Produce v3 takes nothing older


def reencoded(ids: IdMap, request: Message, version: int) -> tuple[Message, list[Difference]]:
    """The request, with the target's ids already, in another version of its API, and what that
    version has no field for.

    Raises Untranslatable if that version cannot say the same.
    """
    definition = catalog.api(request.api_key).request
    old, new = (layout(definition, each) for each in (request.api_version, version))
    body, dropped = request.body, list[Difference]()
    if request.api_key == ApiKey.PRODUCE:
        body = _produced(body, request.api_version, version)
    values = _fitted(ids, old, new, body, Difference("", (), None, ABSENT), dropped)
    kept = request.header.keys() & {"client_id", "correlation_id"}
    header = {name: request.header[name] for name in kept}
    return Message(request.api_key, version, "request", header, values), dropped


def _fitted(
    ids: IdMap, old: Layout, new: Layout, values: Body, at: Difference, dropped: list[Difference]
) -> Body:
    """at: the place of the struct."""
    fitted: Body = {}
    for name, value in _identified(ids, new, values).items():
        here = replace(at, place=f"{at.place}.{name}".removeprefix("."))
        slot, was = new.by_name.get(name), old.by_name.get(name)
        if slot is None:
            if name == UNKNOWN_TAGS:
                is_default = not value
            else:
                is_default = was is None or value == was.default()
            if not is_default:
                if value and name not in DROPPABLE:
                    raise Untranslatable(f"version {new.version} cannot say {here.path}")
                dropped.append(replace(here, captured=value, is_secret=is_secret(name, values)))
            continue
        if value is None and not slot.nullable:
            if was is not None and was.default() is not None:
                raise Untranslatable(f"version {new.version} cannot say that {here.path} is null")
            continue  # its default says nothing either
        inner = slot.inner
        if inner is not None and value is not None:
            before = was.inner if was is not None and was.inner is not None else inner
            if slot.field.is_array:
                there = replace(here, place=f"{here.place}[]")
                keys = [(*at.keys, str(index)) for index in range(len(value))]
                value = [
                    _fitted(ids, before, inner, each, replace(there, keys=of), dropped)
                    for of, each in zip(keys, value, strict=True)
                ]
            else:
                value = _fitted(ids, before, inner, value, here, dropped)
        fitted[name] = value
    return fitted


# Without these a request still asks for the same thing: they are for the broker's log, for checks
# that an older broker does not make, or for limits that it sets itself.
_DROPPABLE_NAMES = (
    "reason client_software_name client_software_version rack_id include_documentation "
    "retention_time_ms current_leader_epoch last_fetched_epoch committed_leader_epoch "
    "require_stable member_epoch log_start_offset timeout_ms protocol_type protocol_name "
    "rebalance_timeout_ms"
)
DROPPABLE = frozenset(_DROPPABLE_NAMES.split())


def _identified(ids: IdMap, new: Layout, values: Body) -> Body:
    """A topic's struct by its id if the new version has no name for it, or the other way round
    (KIP-516)."""
    name = next((each for each in ("topic", "name") if each in values or each in new.by_name), "")
    keys = {name, "topic_id"}
    had, wanted = keys & values.keys(), keys & new.by_name.keys()
    if not name or len(had) != 1 or len(wanted) != 1 or had == wanted:
        return values
    if name in values:
        found: Body = {"topic_id": ids.target.topic_ids.get(values[name], ZERO_UUID)}
    elif values["topic_id"] in ids.target.names:
        found = {name: ids.target.names[values["topic_id"]]}
    else:
        raise Untranslatable("a topic id whose name at the target is not known")
    return {key: value for key, value in values.items() if key not in keys} | found


def _produced(body: Body, old: int, new: int) -> Body:
    """A Produce with records that the new version takes."""
    if old >= _MAGIC_2_SINCE > new:
        raise Untranslatable("record batches cannot be made the messages of Produce v2")
    if new >= _MAGIC_2_SINCE > old:
        for topic in body["topic_data"]:
            for each in entries(topic["partition_data"]):
                each["records"] = _as_batch(each["records"])
    return body


def _as_batch(data: bytes | None) -> bytes | None:
    """Messages of magic 0 and 1 as one record batch, uncompressed."""
    if not data:
        return data
    found = decode_record_set(data)
    if found.faults.size or not found.records:
        raise Untranslatable("the messages of an old format cannot be read to be sent in a new one")
    records = [{**record, "offset": at, "headers": []} for at, record in enumerate(found.records)]
    return encode_batch(records, base_offset=0)

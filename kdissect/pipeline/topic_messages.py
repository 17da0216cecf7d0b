"""Topics that messages name: beside a topic id, also inside of an Envelope; in Metadata without an
id; in the metadata log.

Brokers learn topics by fetching ``__cluster_metadata`` from the controllers, so a capture of a
cluster may name a topic nowhere else. Most of a capture is fetches, so only a few are read: the
request must contain the log's name or its fixed id, and the response must be large enough to hold a
batch. A batch that is split between two responses of a snapshot is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import Indices, TimesNs
from kdissect.capture.mapped_files import Sources
from kdissect.codec.compression import DecompressionLimits
from kdissect.codec.embedded_structs import Places
from kdissect.codec.internal_records import METADATA, METADATA_MARKS, decode_internal
from kdissect.codec.message_columns import decode_columns
from kdissect.codec.record_batches import RecordChunk, iter_record_chunks
from kdissect.kafka.assembly import Assembly
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.column_plan import Role, plan, role_of
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES, Field
from kdissect.tables.message_chunk import FrameBuffer, chunks
from kdissect.tables.message_marks import ChunkMarks
from kdissect.tables.topics import ZERO_UUID_TEXT, SeenTopics

_SMALLEST_BATCH = 61


@cache
def binding_structs() -> dict[tuple[int, int], frozenset[tuple[tuple[str, ...], str, str]]]:
    """By (api key, side): the structs that hold a topic's name beside its id in some version, as
    (their path, field of the name, field of the id)."""
    found = {}
    for key, api in catalog.apis().items():
        for side, definition in enumerate((api.request, api.response)):
            versions = range(definition.versions.first, definition.versions.last + 1)
            structs = frozenset(
                each for version in versions for each in _binding(definition.fields, version)
            )
            if structs:
                found[key, side] = structs
    return found


def _binding(
    fields: tuple[Field, ...], version: int, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str, str]]:
    here = [one for one in fields if version in one.versions]
    roles = {role_of(-1, one): one.name for one in here if not one.is_array}
    if Role.TOPIC_NAME in roles and Role.TOPIC_ID in roles:
        yield path, roles[Role.TOPIC_NAME], roles[Role.TOPIC_ID]
    for one in here:
        yield from _binding(one.fields, version, (*path, one.name))


def add_bound(
    topics: SeenTopics, api_key: int, side: int, body: pa.StructArray, time_ns: TimesNs
) -> None:
    """Add the topics that messages name beside an id. time_ns: of each message."""
    for path, name, topic_id in binding_structs()[api_key, side]:
        structs, times = body, time_ns
        for step in path:
            structs = structs.field(step)
            if pa.types.is_list(structs.type):
                times = times[pc.list_parent_indices(structs).to_numpy()]
                structs = structs.flatten()
        rows = pa.table(
            {"name": structs.field(name), "id": structs.field(topic_id), "time_ns": times}
        )
        # a request may name a topic by its id alone, with an empty name
        is_named = pc.and_(pc.not_equal(rows["name"], ""), pc.not_equal(rows["id"], ZERO_UUID_TEXT))
        _add_distinct(topics, rows.filter(is_named), catalog.api(api_key).name)


def _add_distinct(topics: SeenTopics, rows: pa.Table, api_name: str) -> None:
    """Add each distinct `name` and `id`, with its earliest `time_ns`."""
    grouped = rows.group_by(["name", "id"], use_threads=False).aggregate([("time_ns", "min")])
    for row in grouped.to_pylist():
        topics.add(row["name"], row["id"], row["time_ns_min"], api_name)


def add_named(topics: SeenTopics, body: pa.StructArray, time_ns: TimesNs) -> None:
    """Add the topics in Metadata responses that have no topic id: before v10, or from older
    brokers."""
    listed = body.field("topics")
    flat = listed.flatten()
    if not len(flat):
        return
    topic_id = flat.field("topic_id")
    without_id = pc.or_kleene(pc.is_null(topic_id), pc.equal(topic_id, ZERO_UUID_TEXT))
    is_named = pc.fill_null(pc.not_equal(flat.field("name"), ""), False)
    exists = pc.and_(pc.equal(flat.field("error_code"), 0), is_named)
    times = time_ns[pc.list_parent_indices(listed).to_numpy()]
    rows = pa.table({"name": flat.field("name"), "id": [""] * len(flat), "time_ns": times})
    _add_distinct(topics, rows.filter(pc.and_(without_id, exists)), "Metadata")


def add_from_envelopes(topics: SeenTopics, assembly: Assembly, sources: Sources) -> None:
    """Add the topics in requests that a broker forwards to the controller, and in the responses
    (KIP-590). If clients use TLS, a capture may show a CreateTopics only there."""
    exchanges = assembly.exchanges
    rows = np.flatnonzero(exchanges["api_key"] == ApiKey.ENVELOPE)
    for chunk in chunks(rows, exchanges["request"]["size"]):
        frames = FrameBuffer.gather(assembly, sources, chunk)
        whole = [frames.readable(ApiKey.ENVELOPE, side) for side in (REQUEST, RESPONSE)]
        chosen = np.intersect1d(whole[REQUEST], whole[RESPONSE], assume_unique=True)
        inner = [
            Places.of(frames.decode(ApiKey.ENVELOPE, side, chosen).body.field(f"{name}_data"))
            for side, name in enumerate(SIDES)
        ]
        keys, versions = inner[REQUEST].int16()[0], inner[REQUEST].int16(2)[0].astype(np.int16)
        for key, side in binding_structs():
            some = np.flatnonzero((keys == key) & (inner[side].length > 0))
            if len(some):
                places, name = inner[side].take(some), SIDES[side]
                end = places.start + places.length
                decoded = decode_columns(
                    plan(key, name), places.buf, places.start, end, versions[some]
                )
                time_ns = frames.exchanges[name]["time_ns"][chosen[some]]
                add_bound(topics, key, side, decoded.body, time_ns)


# -- the metadata log -----------------------------------------------------------------------


def add_from_metadata_log(topics: SeenTopics, assembly: Assembly, sources: Sources) -> None:
    """Add every topic in records of the metadata log."""
    exchanges = assembly.exchanges
    rows = np.flatnonzero(
        np.isin(exchanges["api_key"], (ApiKey.FETCH, ApiKey.FETCH_SNAPSHOT))
        & (exchanges["request"]["is_whole"] != 0)
        & (exchanges["response"]["is_whole"] != 0)
        & (exchanges["response"]["size"] > _SMALLEST_BATCH)
    )
    for chunk in chunks(rows, exchanges["request"]["size"]):
        asking = chunk[_asking(assembly, sources, chunk)]
        for some in chunks(asking, exchanges["response"]["size"]):
            frames = FrameBuffer.gather(assembly, sources, some, (RESPONSE,))
            for api_key in (ApiKey.FETCH, ApiKey.FETCH_SNAPSHOT):
                _add_records(topics, frames, api_key)


def _asking(assembly: Assembly, sources: Sources, rows: Indices) -> Indices:
    """Those of the requests that contain the log's name or id."""
    frames = FrameBuffer.gather(assembly, sources, rows, (REQUEST,))
    data = frames.buf.tobytes()
    ends = frames.end[:, REQUEST]
    asking = set()
    for mark in METADATA_MARKS:
        at = data.find(mark)
        while at >= 0:
            row = int(np.searchsorted(ends, at, side="right"))
            asking.add(row)
            # continue at the next request: one match per request is enough
            at = data.find(mark, max(at + 1, int(ends[row])))
    return np.array(sorted(asking), np.int64)


def _add_records(topics: SeenTopics, frames: FrameBuffer, api_key: int) -> None:
    """Add the topics in whole batches of these responses."""
    chosen = frames.readable(api_key, RESPONSE)
    if not len(chosen):
        return
    decoded = frames.decode(api_key, RESPONSE, chosen)
    parts = [(chosen, RESPONSE, decoded.marks)]
    marks = ChunkMarks(parts, frames.buf, len(frames.exchanges), SeenTopics().names())
    sets, lead = marks.record_sets(frames.api_key)
    start = np.ascontiguousarray(sets["value"] + lead)
    length = np.where(marks.topics.is_metadata(sets["topic"]), sets["length"] - lead, 0)
    time_ns = frames.exchanges["response"]["time_ns"][sets["row"]]
    for part in iter_record_chunks(frames.buf, start, length, DecompressionLimits()):
        _add_topic_records(topics, part, time_ns, catalog.api(api_key).name)


def _add_topic_records(
    topics: SeenTopics, part: RecordChunk, time_ns: TimesNs, api_name: str
) -> None:
    """Add the topics of TopicRecords; time_ns: of each record set."""
    records = pa.table(part.records)
    records = records.filter(records["control_type"].is_null())
    set_index = records["set_index"].to_numpy()
    columns, _ = decode_internal(METADATA, records["key"], records["value"])
    for column in columns:
        if column.name == "TopicRecord":
            times = time_ns[set_index[column.rows]]
            names, ids = column.value.field("name"), column.value.field("topic_id")
            named = pa.table({"name": names, "id": ids, "time_ns": times})
            _add_distinct(topics, named, api_name)

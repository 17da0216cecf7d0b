"""Exchanges to table rows: gather the frames of a chunk, run the plans, decode the record sets.

`Decoder.run` takes an assembly (the exchanges of one slot) and gives tables to a sink, chunk by
chunk, in order of time. A chunk is about `chunk_bytes` of frames, so that what one kernel wrote
is still in the cache when the next one reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kdissect.arrays import in_order_of_time, take
from kdissect.capture.mapped_files import Sources
from kdissect.codec.message_columns import MessageColumns, body_type
from kdissect.codec.record_batches import iter_record_chunks
from kdissect.kafka.assembly import Anomaly, Assembly
from kdissect.pipeline.facts import CaptureFacts, NamesUsed
from kdissect.pipeline.frame_buffer import FrameBuffer
from kdissect.pipeline.options import Options
from kdissect.pipeline.record_output import alike, as_shown
from kdissect.pipeline.record_sets import record_sets
from kdissect.pipeline.story_events import ChunkStories
from kdissect.protocol import catalog
from kdissect.protocol.api_keys import ApiKey
from kdissect.protocol.column_plan import Role, role_of
from kdissect.protocol.model import REQUEST, RESPONSE, SIDES, Field, Type
from kdissect.status import REASONS, Status
from kdissect.stories.events import Collector
from kdissect.stories.messages import Messages
from kdissect.tables.anomalies import anomaly_columns, in_parts, texts, texts_of_kinds
from kdissect.tables.arrow_arrays import (
    binaries,
    ints,
    labels,
    names_of,
    strings,
    times_from_ns,
)
from kdissect.tables.connections import broker_texts
from kdissect.tables.embedded import EmbeddedFault, add_decoded
from kdissect.tables.exchanges import (
    SASL_TOKEN,
    DecodeStatus,
    ExchangeFacts,
    VersionSource,
    exchanges_table,
)
from kdissect.tables.message_facts import (
    METADATA_TOPIC,
    METADATA_TOPIC_ID,
    ChunkMarks,
    RecordSets,
    message_marks,
)
from kdissect.tables.payload import FULL
from kdissect.tables.records import (
    FETCH,
    NO_OFFSET,
    PRODUCE,
    RAFT_FETCH,
    REPLICA_FETCH,
    SHARE_FETCH,
    SNAPSHOT,
    RecordRows,
    RecordSetFacts,
)
from kdissect.tables.redaction import TEXT, redact_body
from kdissect.tables.schemas import UNKNOWN_TAGS, api_schema
from kdissect.tables.waits import Wait, waits

SIDE_NUMBERS = REQUEST, RESPONSE
CHUNK_ROWS = 1 << 16
LARGE_FRAME = 4096  # bytes beyond count a quarter
_NO_BYTES = pa.scalar(None, pa.binary())

Ints = npt.NDArray[Any]

Sink = Callable[[str, pa.Table], None]

_RECORD_SOURCES = {
    ApiKey.PRODUCE: PRODUCE,
    ApiKey.FETCH: FETCH,
    ApiKey.SHARE_FETCH: SHARE_FETCH,
    ApiKey.FETCH_SNAPSHOT: SNAPSHOT,
}

# Messages whose bytes may hold secrets: shown as [redacted] in anomalies.data by default.
SECRET_APIS = frozenset(
    {
        ApiKey.SASL_HANDSHAKE,
        ApiKey.CREATE_TOPICS,
        ApiKey.DESCRIBE_CONFIGS,
        ApiKey.ALTER_CONFIGS,
        ApiKey.SASL_AUTHENTICATE,
        ApiKey.CREATE_DELEGATION_TOKEN,
        ApiKey.RENEW_DELEGATION_TOKEN,
        ApiKey.EXPIRE_DELEGATION_TOKEN,
        ApiKey.DESCRIBE_DELEGATION_TOKEN,
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
        ApiKey.ENVELOPE,
    }
)

_EMBEDDED_FAULTS = {
    Status.INVALID_UTF8: Anomaly.INVALID_UTF8,
    Status.CORRUPT: Anomaly.DECOMPRESSION_FAILED,
    Status.LIMIT: Anomaly.DECOMPRESSION_LIMIT,
}


@dataclass(slots=True)
class _Decoded:
    """Messages of one API and side: rows (of the chunk) and their columns."""

    rows: npt.NDArray[np.int64]
    columns: MessageColumns


@dataclass(slots=True)
class _Chunk:
    """A chunk while it is worked on."""

    frames: FrameBuffer
    status: npt.NDArray[np.int8]  # DecodeStatus [n, 2]
    version_source: npt.NDArray[np.int8]
    decoded: dict[tuple[int, int], _Decoded] = field(default_factory=dict)


@cache
def _carries_records(api_key: int, side: int) -> bool:
    """Whether messages of that API and side may hold records; True where nothing is known."""

    def has(fields: tuple[Field, ...]) -> bool:
        return any(item.type is Type.RECORDS or has(item.fields) for item in fields)

    if api_key not in catalog.apis():
        return True
    return has(catalog.api(api_key).side(SIDES[side]).fields)


@cache
def error_versions(api_key: int) -> npt.NDArray[np.bool_]:
    """Per api_version: does the response's definition have an error code anywhere."""

    def has(fields: tuple[Field, ...], api_version: int) -> bool:
        return any(
            role_of(api_key, item) is Role.ERROR_CODE or has(item.fields, api_version)
            for item in fields
            if api_version in item.versions
        )

    response = catalog.api(api_key).response
    return np.array([has(response.fields, n) for n in range(response.versions.last + 1)], bool)


class Decoder:
    """Decodes assemblies into a sink; holds what all chunks share."""

    def __init__(
        self,
        sources: Sources,
        capture_ids: list[int],
        facts: CaptureFacts,
        options: Options,
        sink: Sink,
        events: Collector,
    ) -> None:
        self.sources = sources
        self.capture_ids = capture_ids
        self.options = options
        self.sink = sink
        self.events = events
        self.names_by_id = facts.names_by_id()
        self.ids_by_name = facts.ids_by_name()
        self.names_used = NamesUsed()

    def run(self, assembly: Assembly) -> None:
        """All exchanges of the assembly, in order of time."""
        self.assembly = assembly
        self.brokers = broker_texts(assembly.endpoints, assembly.connections)
        for rows in self._chunks(assembly.exchanges):
            self._chunk(rows)

    def _chunks(self, exchanges: npt.NDArray[np.void]) -> Iterator[npt.NDArray[np.int64]]:
        asked = exchanges["request"]["size"] >= 0
        time_ns = np.where(asked, exchanges["request"]["time_ns"], exchanges["response"]["time_ns"])
        order = in_order_of_time(time_ns, exchanges["exchange_id"])
        sizes = np.zeros(len(exchanges), np.int64)
        for side in SIDES:
            column = exchanges[side]
            size = np.where(column["is_whole"] != 0, column["size"], 64)
            # what is large are records, which are decoded in smaller pieces anyway
            sizes += np.minimum(size, LARGE_FRAME) + np.maximum(size - LARGE_FRAME, 0) // 4
        filled = (np.cumsum(sizes[order]) - sizes[order]) // self.options.chunk_bytes
        number = filled + np.arange(len(order)) // CHUNK_ROWS
        if len(order):
            yield from np.split(order, np.flatnonzero(np.diff(number)) + 1)

    def _chunk(self, rows: npt.NDArray[np.int64]) -> None:
        frames = FrameBuffer.gather(self.assembly, self.sources, rows)
        chunk = _Chunk(frames, *self._initial_status(frames))
        for api_key in np.unique(frames.api_key).tolist():
            if api_key in catalog.apis():
                for side in (REQUEST, RESPONSE):
                    self._decode_side(chunk, api_key, side)
        self._unknown(chunk)
        marks = ChunkMarks(
            [
                message_marks(decoded.rows, side, decoded.columns.marks)
                for (_, side), decoded in chunk.decoded.items()
            ],
            frames.buf,
            len(rows),
            self.names_by_id,
        )
        self.names_used.ids.update(set(marks.topic_ids).difference(self.names_by_id))
        client_ids = self._client_ids(frames)
        self._write_exchanges(chunk, marks, client_ids)
        self._write_apis(chunk)
        self._write_tokens(chunk)
        stories = self._stories(chunk, marks, client_ids)
        stories.add_messages()
        self._write_records(chunk, marks, stories)

    # -- messages ---------------------------------------------------------------------------

    def _initial_status(
        self, frames: FrameBuffer
    ) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]]:
        exchanges = frames.exchanges
        known_keys = np.array(sorted(catalog.apis()))
        has_api = np.isin(frames.api_key, known_keys)
        token = exchanges["is_sasl_token"] != 0
        status = np.full((len(exchanges), 2), DecodeStatus.ABSENT, np.int8)
        for side in (REQUEST, RESPONSE):
            column = exchanges[SIDES[side]]
            here = column["size"] >= 0
            state = np.where(
                frames.known(side),
                DecodeStatus.OK,
                np.where(has_api, DecodeStatus.UNKNOWN_VERSION, DecodeStatus.UNKNOWN_API),
            )
            state = np.where(token, DecodeStatus.OK, state)
            state = np.where(
                (column["is_whole"] == 0) & (state == DecodeStatus.OK), DecodeStatus.PARTIAL, state
            )
            status[:, side] = np.where(here, state, DecodeStatus.ABSENT)
        version_source = np.full(len(exchanges), VersionSource.REQUEST_HEADER, np.int8)
        version_source[(exchanges["request"]["size"] < 0) | token] = VersionSource.UNKNOWN
        fell_back = (frames.api_key == 18) & (frames.response_version != frames.api_version)
        version_source[fell_back] = VersionSource.FALLBACK_V0
        version_source[exchanges["confidence"] > 0] = VersionSource.INFERRED
        return status, version_source

    def _decode_side(self, chunk: _Chunk, api_key: int, side: int) -> None:
        rows = chunk.frames.readable(api_key, side)
        if not len(rows):
            return
        columns = chunk.frames.decode(api_key, side, rows, self.options.limits.array_elements)
        chunk.decoded[api_key, side] = _Decoded(rows, columns)
        failed = np.flatnonzero(columns.status)
        chunk.status[rows[failed], side] = DecodeStatus.MALFORMED
        is_limit = columns.status[failed] == Status.LIMIT
        for kind, some in (
            (Anomaly.MALFORMED_MESSAGE, failed[~is_limit]),
            (Anomaly.LIMIT, failed[is_limit]),
        ):
            if len(some):
                self._malformed(chunk, kind, api_key, side, rows[some], some)
        name = catalog.api(api_key).name
        if len(at := np.flatnonzero(columns.surplus > 0)):
            surplus, end = columns.surplus[at], chunk.frames.end[rows[at], side]
            said = f"{{n}} bytes after the end of a {name} {SIDES[side]}"
            detail = texts(said, len(at), n=surplus)
            place = (end - surplus, end)
            self._message_anomalies(chunk, Anomaly.SURPLUS_BYTES, rows[at], side, detail, place)
        if len(at := np.flatnonzero(columns.invalid_utf8)):
            detail = texts(f"a string of a {name} {SIDES[side]} is no UTF-8", len(at))
            self._message_anomalies(chunk, Anomaly.INVALID_UTF8, rows[at], side, detail)

    def _malformed(
        self, chunk: _Chunk, kind: Anomaly, api_key: int, side: int, rows: Ints, failed: Ints
    ) -> None:
        """Anomalies of the messages `rows` of the chunk, which are `failed` of those decoded."""
        columns = chunk.decoded[api_key, side].columns
        status = columns.status[failed]
        path = columns.error_paths(failed)
        detail = texts(
            f"{catalog.api(api_key).name} v{{version}} {SIDES[side]}{{path}}, pos {{pos}}: {{why}}",
            len(failed),
            version=chunk.frames.versions(side)[rows],
            path=pc.if_else(pc.equal(path, ""), "", pc.binary_join_element_wise(" > ", path, "")),
            pos=columns.error_pos[failed],
            why=texts_of_kinds(status, lambda code, some: texts(REASONS[Status(code)], len(some))),
        )
        self._message_anomalies(chunk, kind, rows, side, detail)

    def _unknown(self, chunk: _Chunk) -> None:
        """Anomalies of messages without a definition; their bytes are kept there."""
        for state, kind in (
            (DecodeStatus.UNKNOWN_API, Anomaly.UNKNOWN_API),
            (DecodeStatus.UNKNOWN_VERSION, Anomaly.UNKNOWN_VERSION),
        ):
            # a response without its request has an anomaly already
            asked = chunk.frames.exchanges["request"]["size"] >= 0
            for side in SIDE_NUMBERS:
                rows = np.flatnonzero((chunk.status[:, side] == state) & asked)
                if not len(rows):
                    continue
                some = take(chunk.frames.exchanges, rows)
                detail = texts(
                    "no definition for api key {key} version {version}",
                    len(rows),
                    key=some["api_key"],
                    version=some["api_version"],
                )
                self._message_anomalies(chunk, kind, rows, side, detail)

    def _message_anomalies(
        self,
        chunk: _Chunk,
        kind: Anomaly,
        rows: Ints,
        side: int,
        detail: pa.Array,
        place: tuple[Ints, Ints] | None = None,
        packet_pos: Ints | None = None,
        data: pa.Array | None = None,
    ) -> None:
        """Anomalies of a side of the exchanges `rows` of the chunk (a row may come repeatedly).

        place: where their bytes start and end in the chunk's buffer, if not all of the message.
        packet_pos: what to add to its stream position. data: bytes to show, where not null.
        """
        frames, options = chunk.frames, self.options
        start, end = place or (frames.start[rows, side], frames.end[rows, side])
        data_max = options.limits.anomaly_data
        size = np.minimum(end - start, data_max)
        for part in in_parts(size):
            exchanges = frames.exchanges[rows[part]]
            column = exchanges[SIDES[side]]
            shown = binaries(frames.buf, start[part], size[part])
            if data is not None:
                shown = pc.coalesce(pc.binary_slice(data[part], 0, data_max), shown)
            api_key = exchanges["api_key"]
            if not options.reveal_secrets:
                secret = pa.array(np.isin(api_key, list(SECRET_APIS)))
                shown = pc.if_else(secret, pa.scalar(TEXT.encode()), shown)
            if options.payload != FULL:
                keys = [key for key in np.unique(api_key).tolist() if _carries_records(key, side)]
                shown = pc.if_else(pa.array(np.isin(api_key, keys)), _NO_BYTES, shown)
            pos, there = column["pos"], column["source"] >= 0
            connections = self.assembly.connections["connection_id"][exchanges["connection"]]
            captures = np.array([*self.capture_ids, 0], np.int64)[column["source"]]
            table = anomaly_columns(
                np.full(len(exchanges), kind, np.uint8),
                detail[part],
                connection_id=ints(connections, pa.int64()),
                exchange_id=ints(exchanges["exchange_id"], pa.int64()),
                capture_id=ints(captures, pa.int64(), there),
                packet=ints(column["packet"], pa.int64(), there),
                direction=np.full(len(exchanges), side),
                pos=ints(pos if packet_pos is None else pos + packet_pos[part], pa.int64()),
                byte_count=ints((end - start)[part], pa.int64()),
                data=shown,
            )
            self.sink("anomalies", table)

    # -- tables -----------------------------------------------------------------------------

    def _client_ids(self, frames: FrameBuffer) -> pa.Array:
        """client_id of every request whose header is there, known version or not."""
        exchanges = frames.exchanges
        start, end = frames.start[:, REQUEST], frames.end[:, REQUEST]
        has_header = (
            (end - start >= 10)
            & (exchanges["is_sasl_token"] == 0)
            & (frames.api_key >= 0)
            & ~((frames.api_key == 7) & (frames.api_version == 0))
        )
        at = np.where(has_header, start + 8, 0)
        if len(frames.buf) < 2:
            return pa.nulls(len(exchanges), pa.string())
        at = np.minimum(at, len(frames.buf) - 2)
        size = ((frames.buf[at].astype(np.int64) << 8) | frames.buf[at + 1]).astype(np.int16)
        length = size.astype(np.int64)
        fits = has_header & (length >= 0) & (start + 10 + length <= end)
        texts, _ = strings(frames.buf, start + 10, np.where(fits, length, -1))
        return texts.dictionary_encode()

    def _stories(self, chunk: _Chunk, marks: ChunkMarks, client_ids: pa.Array) -> ChunkStories:
        exchanges = chunk.frames.exchanges
        captures = np.array([*self.capture_ids, 0], np.int64)
        messages = Messages(
            exchanges=exchanges,
            connection_id=self.assembly.connections["connection_id"][exchanges["connection"]],
            capture_id=captures[exchanges["request"]["source"]],
            client_id=client_ids,
            broker=self.brokers.take(pa.array(exchanges["connection"])),
            error_code=marks.error_columns[0],
            decoded={key: (one.rows, one.columns) for key, one in chunk.decoded.items()},
            topic_names=self.names_by_id,
        )
        return ChunkStories(self.events, messages, chunk.frames, marks)

    def _write_exchanges(self, chunk: _Chunk, marks: ChunkMarks, client_ids: pa.Array) -> None:
        has_error = np.zeros(len(chunk.status), bool)
        for (api_key, side), decoded in chunk.decoded.items():
            if side == RESPONSE:
                versions = chunk.frames.versions(RESPONSE)[decoded.rows]
                has_error[decoded.rows] = error_versions(api_key)[versions] & (
                    decoded.columns.status == 0
                )
        is_decoded = (chunk.status == DecodeStatus.OK).all(axis=1)
        wait, is_known = waits(chunk.frames.exchanges, is_decoded, marks)
        facts = ExchangeFacts(
            chunk.status, chunk.version_source, has_error,
            labels(wait, names_of(Wait), is_known), client_ids,
        )  # fmt: skip
        self.sink(
            "exchanges",
            exchanges_table(
                self.assembly.endpoints,
                self.assembly.connections,
                chunk.frames.exchanges,
                self.capture_ids,
                facts,
                marks,
            ),
        )

    def _write_apis(self, chunk: _Chunk) -> None:
        for api_key in sorted({key for key, _ in chunk.decoded}):
            is_good = np.zeros(len(chunk.status), np.bool_)
            for side in (REQUEST, RESPONSE):
                if (decoded := chunk.decoded.get((api_key, side))) is not None:
                    is_good[decoded.rows[decoded.columns.status == 0]] = True
            rows = np.flatnonzero(is_good)
            if not len(rows):
                continue
            name = catalog.api(api_key).name
            bodies, tags = [], []
            for side in (REQUEST, RESPONSE):
                body, tag = self._side_columns(chunk, api_key, side, rows)
                bodies.append(body)
                tags.append(tag)
            api_version = ints(chunk.frames.api_version[rows], pa.int16())
            self._write_api(chunk, api_key, name, rows, api_version, bodies, tags)

    def _write_tokens(self, chunk: _Chunk) -> None:
        """Raw SASL tokens, as SaslAuthenticate's; they have no version."""
        frames = chunk.frames
        is_token = frames.exchanges["is_sasl_token"] != 0
        there = [frames.whole(s) & (frames.exchanges[SIDES[s]]["size"] >= 0) for s in SIDE_NUMBERS]
        rows = np.flatnonzero(is_token & (there[REQUEST] | there[RESPONSE]))
        if not len(rows):
            return
        bodies = []
        for side in SIDE_NUMBERS:
            start, end = frames.start[rows, side].tolist(), frames.end[rows, side].tolist()
            tokens = [
                {"auth_bytes": frames.buf[a:b].tobytes()} if is_there else None
                for a, b, is_there in zip(start, end, there[side][rows], strict=True)
            ]
            bodies.append(pa.array(tokens, pa.struct([("auth_bytes", pa.binary())])))
        none = pa.nulls(len(rows), pa.int16())
        tags = [pa.nulls(len(rows), UNKNOWN_TAGS)] * 2
        self._write_api(chunk, ApiKey.SASL_AUTHENTICATE, SASL_TOKEN, rows, none, bodies, tags)

    def _write_api(
        self,
        chunk: _Chunk,
        api_key: int,
        name: str,
        rows: npt.NDArray[np.int64],
        api_version: pa.Array,
        bodies: list[pa.Array],
        tags: list[pa.Array],
    ) -> None:
        """The table of one API, with what is inside its bytes."""
        bodies = self._embedded(chunk, api_key, bodies, rows)
        some = take(chunk.frames.exchanges, rows)
        ids = self.assembly.connections["connection_id"][some["connection"]]
        request, response = some["request"], some["response"]
        columns = [
            ints(some["exchange_id"], pa.int64()),
            ints(ids, pa.int64()),
            api_version,
            times_from_ns(request["time_ns"], request["size"] >= 0),
            times_from_ns(response["time_ns"], response["size"] >= 0),
            *bodies,
            *tags,
        ]
        schema = api_schema(bodies[0].type, bodies[1].type)
        self.sink(f"apis/{name}", pa.table(columns, schema=schema))

    def _embedded(
        self, chunk: _Chunk, api_key: int, bodies: list[pa.Array], rows: npt.NDArray[np.int64]
    ) -> list[pa.Array]:
        """Both sides with what is inside their bytes decoded, and without secrets."""
        reveal = self.options.reveal_secrets
        nesting = self.options.limits.nesting
        request, response, faults = add_decoded(api_key, bodies[0], bodies[1], reveal, nesting)
        alike: dict[tuple[Anomaly, int], list[EmbeddedFault]] = defaultdict(list)
        for fault in faults:
            kind = _EMBEDDED_FAULTS.get(fault.status, Anomaly.MALFORMED_EMBEDDED)
            alike[kind, fault.side].append(fault)
        for (kind, side), some in alike.items():
            where = f"{catalog.api(api_key).name} {SIDES[side]} > "
            detail = pa.array([where + fault.detail for fault in some], pa.string())
            at = rows[[fault.row for fault in some]]
            self._message_anomalies(chunk, kind, at, side, detail)
        if reveal:
            return [request, response]
        return [redact_body(request, api_key, REQUEST), redact_body(response, api_key, RESPONSE)]

    def _side_columns(
        self, chunk: _Chunk, api_key: int, side: int, rows: npt.NDArray[np.int64]
    ) -> tuple[pa.Array, pa.Array]:
        decoded = chunk.decoded.get((api_key, side))
        if decoded is None:
            kind = body_type(api_key, SIDES[side])
            return pa.nulls(len(rows), kind), pa.nulls(len(rows), UNKNOWN_TAGS)
        body = decoded.columns.body
        if len(decoded.rows) == len(rows) and bool(np.all(decoded.rows == rows)):
            return body, decoded.columns.unknown_tags
        at = np.searchsorted(decoded.rows, rows)
        found = (at < len(decoded.rows)) & (
            decoded.rows[np.minimum(at, len(decoded.rows) - 1)] == rows
        )
        via = pa.array(at, pa.int64(), mask=~found)
        return body.take(via), decoded.columns.unknown_tags.take(via)

    # -- records ----------------------------------------------------------------------------

    def _write_records(self, chunk: _Chunk, marks: ChunkMarks, stories: ChunkStories) -> None:
        frames = chunk.frames
        sets, lead = record_sets(marks, frames.api_key, frames.buf)
        if not len(sets.row):
            return
        named = np.unique(sets.topic[(sets.topic >= 0) & (sets.topic_id < 0)])
        self.names_used.names.update(marks.topics[code] for code in named.tolist())
        facts = RecordSetFacts(
            sets=sets,
            exchange_id=frames.exchanges["exchange_id"][sets.row],
            source=self._record_source(frames.api_key[sets.row], sets, marks),
            produced_offset=self._produced_offset(sets, marks),
            topics=marks.topics,
            topic_ids=marks.topic_ids,
            id_of_name=self.ids_by_name,
        )
        rows = RecordRows(facts, lead)
        start = np.ascontiguousarray(sets.start + lead, np.int64)
        length = np.ascontiguousarray(sets.length - lead, np.int64)
        for part in iter_record_chunks(frames.buf, start, length, self.options.limits.of_records):
            raw = pa.table(part.batches)
            batches, records = rows.add(raw, pa.table(part.records))
            stories.add_batches(sets, facts.source, raw, batches)
            if batches.num_rows:
                self.sink("record_batches", batches)
            if records.num_rows:
                set_index = part.records.column("set_index").to_numpy()
                table, wrong = as_shown(records, self.options, self.sink)
                self.sink("records", table)
                self._internal_anomalies(chunk, sets, wrong, set_index)
            self._record_anomalies(chunk, sets, marks.topics, part.faults)
        if lead.any():
            self.sink("record_batches", rows.batch_ends())

    def _record_source(
        self, api_key: npt.NDArray[Any], sets: RecordSets, marks: ChunkMarks
    ) -> npt.NDArray[np.int8]:
        source = np.zeros(len(sets.row), np.int8)
        for key, code in _RECORD_SOURCES.items():
            source[api_key == key] = code
        replica, has_replica = marks.first_number(Role.REPLICA_ID)
        follower = has_replica[sets.row] & (replica[sets.row] >= 0)
        source[(source == FETCH) & follower] = REPLICA_FETCH
        raft_names = [n for n, name in enumerate(marks.topics) if name == METADATA_TOPIC]
        raft_ids = [n for n, text in enumerate(marks.topic_ids) if text == METADATA_TOPIC_ID]
        raft = np.isin(sets.topic, raft_names) | np.isin(sets.topic_id, raft_ids)
        source[raft & np.isin(source, (FETCH, REPLICA_FETCH))] = RAFT_FETCH
        return source

    @staticmethod
    def _produced_offset(sets: RecordSets, marks: ChunkMarks) -> npt.NDArray[np.int64]:
        """Base offset that the response gave for each produced set, by topic and partition."""
        given = marks.places(Role.BASE_OFFSET)
        offset = np.full(len(sets.row), NO_OFFSET, np.int64)
        asked = np.flatnonzero(sets.side == REQUEST)
        if not len(given.row) or not len(asked):
            return offset
        id_count = len(marks.topic_ids)
        width = len(marks.topics) + id_count + 1

        def messages_topics(rows: RecordSets) -> npt.NDArray[np.int64]:
            # an id without a name counts before the names, so that it never equals a name's code
            topic = np.where(rows.topic >= 0, rows.topic + id_count, rows.topic_id)
            return rows.row * width + topic + 1

        pairs = np.concatenate([messages_topics(given), messages_topics(sets)[asked]])
        # with their index, since that sorts by merging runs: they are nearly in order
        _, _, pairs = np.unique(pairs, return_index=True, return_inverse=True)
        partition = np.concatenate([given.partition, sets.partition[asked]])
        keys = (pairs << 32) | (partition & 0xFFFFFFFF)
        known, first = np.unique(keys[: len(given.row)], return_index=True)
        wanted = keys[len(given.row) :]
        at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        offset[asked] = np.where(known[at] == wanted, given.start[first[at]], NO_OFFSET)
        return offset

    def _record_anomalies(
        self, chunk: _Chunk, sets: RecordSets, topics: list[str], faults: npt.NDArray[np.void]
    ) -> None:
        metadata = [code for code, name in enumerate(topics) if name == METADATA_TOPIC]
        for some, side, kind, reason in alike(faults, sets.side[faults["set_index"]]):
            batch, number, at = some["batch_index"], some["a"], some["set_index"]
            rows, pos = sets.row[at], some["pos"].astype(np.int64)
            secret = np.isin(sets.topic[at], metadata) & (not self.options.reveal_secrets)
            self._message_anomalies(
                chunk,
                kind,
                rows,
                side,
                texts(f"record batch {{batch}}: {reason}", len(some), batch=batch, number=number),
                (pos, pos + some["byte_count"]),
                4 + pos - chunk.frames.start[rows, side],
                pc.if_else(pa.array(secret), pa.scalar(TEXT.encode()), _NO_BYTES),
            )

    def _internal_anomalies(
        self, chunk: _Chunk, sets: RecordSets, faults: Sequence[Any], set_index: Ints
    ) -> None:
        """Anomalies of records of internal topics; each shows its own value."""
        alike: dict[tuple[Anomaly, int], list[Any]] = defaultdict(list)
        for fault in faults:
            alike[fault.kind, int(sets.side[set_index[fault.row]])].append(fault)
        for (kind, side), some in alike.items():
            at = set_index[[fault.row for fault in some]]
            rows, start = sets.row[at], sets.start[at].astype(np.int64)
            data = [TEXT.encode() if fault.is_secret else fault.data for fault in some]
            self._message_anomalies(
                chunk,
                kind,
                rows,
                side,
                pa.array([fault.detail for fault in some], pa.string()),
                (start, start + sets.length[at]),
                4 + start - chunk.frames.start[rows, side],
                pa.array(data, pa.binary()),
            )

"""A folder of captures as a streaming DataFrame.

    query = kdissect.stream(spark, "captures/", late="10m").writeStream...

Theory of operation
-------------------
Spark does what it has a part for: its file source names each new file once, its checkpoint and its
state store make every row come exactly once, its watermark says how late a capture may be.

    file source: paths
      -> _scan       one task for some files: segments with their bytes, by bucket of endpoints
      -> _Connections  stateful, by bucket: the continuation of `resume.carry` gives exchanges
      -> _Messages   stateful, by bucket: decodes them with the topic names of all buckets
      -> rows of the table

*Lateness.* A micro-batch gives the rows of all that is contiguous. Only a gap waits, in a stream or
before the first bytes of a connection whose SYN is missing: a late capture may still fill it, until
the watermark has passed it (`Patience.until`). An event-time timer then gives the gap up. Spark
would drop late rows by itself, so the stateful step does not see the watermark's column.
`resume.carry` counts each packet that comes too late.

*Files that grow.* The file source names a file when it appears, and never again. The newest file,
by name, may still be written. So a task that reads a file also reads the one before it, in the
order of names, unless that is in the same task. `_Connections` leaves out the packets that it knows
by their numbers.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Unpack

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from kdissect.arrays import Array, Bytes, Ids, Rows
from kdissect.capture.inputs import listed
from kdissect.capture.mapped_files import CARRIED_FROM, Sources
from kdissect.capture.segments import ENDPOINTS, SEGMENT, SegmentBatch
from kdissect.capture.windows import Window, WindowReader
from kdissect.codec.redaction import secret_apis
from kdissect.datasource import schema_of
from kdissect.errors import CaptureError
from kdissect.kafka.assembly import Anomaly
from kdissect.packing import pack, unpack
from kdissect.pipeline import exchange_index
from kdissect.pipeline.assemble import anomaly_tables
from kdissect.pipeline.decode import decoded_chunks, write_chunks
from kdissect.pipeline.filters import of_hosts, within
from kdissect.pipeline.learn import Cluster, learn_topics
from kdissect.pipeline.message_tables import TableOutput
from kdissect.pipeline.options import Options, ReadOptions
from kdissect.pipeline.plan import capture_id, read_key_logs
from kdissect.pipeline.saved_state import count_anomalies
from kdissect.pipeline.scan import bucket_of
from kdissect.pipeline.selection import duration_ms
from kdissect.pipeline.spark_session import use_this_python
from kdissect.pipeline.step_rows import ROW_BYTES_MAX, STATE_OPEN, RowKind
from kdissect.pipeline.unrequested_responses import infer
from kdissect.resume.carry import CompletedExchanges, ConnectionCarry, Counts
from kdissect.resume.next_state import payload
from kdissect.resume.open_connection import (
    NEVER,
    OpenConnection,
    from_table,
    keep_sources,
    rows_of,
    to_table,
)
from kdissect.resume.progress import Patience
from kdissect.stories.events import Collector
from kdissect.tables.anomalies import AnomalyRow, anomalies_table
from kdissect.tables.arrow_arrays import packed, plain, unpacked
from kdissect.tables.message_chunk import chunks_in_time
from kdissect.tables.topics import TopicNames

TABLES = ("exchanges", "record_batches", "records", "anomalies", "apis")
# Keys of both stateful steps. A checkpoint depends on their number.
BUCKETS = 64
TOPICS_MAX = 100_000  # topics whose names and ids are remembered
CAPTURES_KEPT = 1024  # captures of a bucket whose last packet is remembered
STATE_STORE = "spark.sql.streaming.stateStore.providerClass"
ROCKS_DB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"

# A capture of a bucket; segments have its row as `source`. last_packet: number of its last packet.
# has_fault: a fault of it is a row.
CAPTURE = np.dtype(
    [("file_id", "<i8"), ("capture_id", "<i8"), ("last_packet", "<i8"), ("has_fault", "u1")]
)
NO_CAPTURES = np.zeros(0, CAPTURE)

_FILES = "path string, modificationTime timestamp, length long, content binary"
_SEGMENTS = "bucket long, time timestamp, data binary"
_COUNTS = ("late_packets", "carry_limits", "topics_left_out")
_PARTS = "bucket long, kind int, data binary, " + ", ".join(f"{name} long" for name in _COUNTS)
_SCANNED = pa.schema({"bucket": pa.int64(), "time": pa.timestamp("us", "UTC"), "data": pa.binary()})
_PART_TYPES = (np.dtype(np.uint8), ENDPOINTS, SEGMENT, np.dtype(np.uint8))
_COMPRESSED = (".gz", ".zst", ".lz4")

Batches = Iterator[pa.RecordBatch]


def stream(
    spark: SparkSession,
    folder: str | os.PathLike[str],
    table: str = "exchanges",
    late: str = "10m",
    max_bytes: int = 1 << 30,
    **options: Unpack[ReadOptions],
) -> DataFrame:
    """A table of the captures that appear in a folder, as a streaming DataFrame.

    Args:
        spark: a session. Its state store becomes RocksDB's, which the stream needs.
        folder: a folder or a glob that all workers can read.
        table: `exchanges`, `record_batches`, `records`, `anomalies` or `apis/NAME`.
        late: how long after its time a capture may appear, as "30s", "10m" or "2h". Only gaps wait
            for it.
        max_bytes: bytes of captures that a micro-batch reads at most.
        options: as for `read`: `ports`, `keylog`, `payload`, `reveal_secrets`, `decode_values`,
            `hosts`, `from_`, `until`, `limits`.

    Raises:
        ValueError, TypeError: the table or an option is wrong.
        CaptureError: the folder or a key log does not exist.
    """
    try:
        import google.protobuf  # noqa: F401 - Spark needs it for stateful streams
    except ImportError:
        raise ImportError("streams need protobuf: pip install 'kdissect[stream]'") from None
    if table.partition("/")[0] not in TABLES:
        raise ValueError(
            f"a stream has no table {table}: it has {', '.join(TABLES[:-1])} and apis/NAME; the "
            "others are known at the end of a capture only"
        )
    place = os.fspath(folder).removeprefix("file://")
    if not os.path.isdir(place) and not glob.has_magic(place):
        raise CaptureError(f"{place}: a stream reads a folder or glob of captures")
    run = Options.of(**options)
    if run.partition_by is not None:
        raise ValueError("partition_by is not for streams: use writeStream.partitionBy")
    read_key_logs(run.keylog)
    late_ms, schema = int(duration_ms(late)), schema_of(table, run)
    use_this_python(spark)
    spark.conf.set(STATE_STORE, ROCKS_DB)
    files = (
        spark.readStream.format("binaryFile")
        .schema(_FILES)
        .option("recursiveFileLookup", "true")
        .option("maxBytesPerTrigger", str(max_bytes))
        .load(place)
        .select("path")
    )
    segments = files.mapInArrow(_scan_stage(place, run), _SEGMENTS)
    # without the column of the watermark: Spark itself drops no late row
    arrived = segments.withWatermark("time", f"{late_ms} milliseconds").drop("time")
    connections = arrived.groupBy("bucket").transformWithState(
        _Connections(table, run, late_ms), _PARTS, "Append", "EventTime"
    )
    messages = connections.groupBy("bucket").transformWithState(
        _Messages(table, run), _PARTS, "Append", "None"
    )
    counted = messages.observe(f"kdissect {table}", *(F.sum(name).alias(name) for name in _COUNTS))
    return counted.mapInArrow(_rows_stage(schema), from_arrow_schema(schema))


# -- files to segments ----------------------------------------------------------------------


def _scan_stage(folder: str, options: Options) -> Callable[[Batches], Batches]:
    def stage(batches: Batches) -> Batches:
        uris = [uri for batch in batches for uri in batch.column("path").to_pylist()]
        paths = sorted(map(os.path.abspath, _visible(listed(folder))), key=_natural)
        place = {path: number for number, path in enumerate(paths)}
        wanted = {os.path.abspath(uri.removeprefix("file:")) for uri in uris}
        numbers = {place[path] for path in wanted & place.keys()}
        for number in sorted(numbers | {max(number - 1, 0) for number in numbers}):
            yield from _scanned(paths[number], options, number < len(paths) - 1)
        for path in sorted(wanted - place.keys()):
            yield _fault_row(path, Anomaly.CAPTURE_MISSING, "was gone before it was read")

    return stage


def _visible(paths: Iterable[str]) -> Iterator[str]:
    """The paths without those that Spark's file source ignores."""
    return (path for path in paths if not os.path.basename(path).startswith((".", "_")))


def _natural(path: str) -> list[tuple[int, str]]:
    """A key that orders numbers in names by their value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]


def _scanned(path: str, options: Options, is_final: bool) -> Batches:
    """The segments of a capture with their bytes, by bucket.

    is_final: the capture does not grow any more, so that its faults are rows.
    """
    faults: dict[Anomaly, str] = {}
    try:
        reader = WindowReader(path, 0, [path])
        for window in reader.windows():
            if window.secrets:
                faults[Anomaly.NOT_DECRYPTED] = "has TLS secrets, which a stream does not read"
            yield from _bucket_rows(window, path, options)
        if reader.error:
            faults[Anomaly.CAPTURE_CUT] = reader.error
    except CaptureError as error:
        faults[Anomaly.NOT_A_CAPTURE] = str(error).removeprefix(f"{path}: ")
    for kind, reason in faults.items() if is_final else ():
        yield _fault_row(path, kind, reason)


def _bucket_rows(window: Window, path: str, options: Options) -> Batches:
    batch = of_hosts(window.batch, options.hosts)
    bucket = bucket_of(batch, BUCKETS)[batch.segments["endpoints"]]
    for number in np.unique(bucket).tolist():
        segments = batch.segments[bucket == number]
        # options of SYNs, which are before the payload, are not needed
        segments["option_words"] = 0
        data = payload(segments, window.sources)
        time_ns = int(segments["time_ns"].max())
        yield _row(number, time_ns, path, batch.endpoints, segments, data)


def _fault_row(path: str, kind: Anomaly, reason: str) -> pa.RecordBatch:
    none = SegmentBatch.concat([])
    fault = np.frombuffer(json.dumps([int(kind), f"{path}: {reason}"]).encode(), np.uint8)
    bucket = capture_id(path) % BUCKETS
    return _row(bucket, 0, path, none.endpoints, none.segments, fault)


def _row(bucket: int, time_ns: int, path: str, *arrays: Array) -> pa.RecordBatch:
    """Segments and their bytes; or no segments, and a fault of the file."""
    data = pack([np.frombuffer(os.fsencode(path), np.uint8), *arrays])
    moment = datetime.fromtimestamp(time_ns // 10**9, UTC)
    columns = {"bucket": [bucket], "time": [moment], "data": [data]}
    return pa.RecordBatch.from_pydict(columns, _SCANNED)


# -- segments to exchanges ------------------------------------------------------------------


class _Connections(StatefulProcessor):
    """Continues the connections of a bucket. State: open connections, CAPTURE rows."""

    def __init__(self, table: str, options: Options, late_ms: int) -> None:
        self.table, self.options, self.late_ms = table, options, late_ms

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.state = handle.getValueState("connections", "connections binary, captures binary")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        parts = [row.data for row in rows]
        yield from self._advance(key[0], parts, timerValues.getCurrentWatermarkInMs())

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Row]:
        yield from self._advance(key[0], [], timerValues.getCurrentWatermarkInMs())

    def _advance(self, bucket: int, parts: list[bytes], watermark_ms: int) -> Iterator[Row]:
        saved, options, late_ns = self.state.get(), self.options, self.late_ms * 10**6
        captures = np.frombuffer(saved[1], CAPTURE) if saved else NO_CAPTURES
        batch, data, captures, faults = _new_packets(parts, captures)
        carry = ConnectionCarry(
            options.stream_options,
            read_key_logs(options.keylog),
            # no capture can come that is older than the first ones
            patience=Patience.until(late_ns, late_ns if watermark_ms else 0),
            connections=_unpacked(saved[0]) if saved else (),
            secret_apis=frozenset() if options.reveal_secrets else secret_apis(),
        )
        now = watermark_ms * 10**6 + late_ns
        found = carry.add(batch, Sources([os.devnull] * len(captures), carried=data), now)
        yield from self._parts(bucket, found, captures["capture_id"])
        yield from self._notes(bucket, carry.counts, faults)
        connections = carry.connections()
        used = keep_sources(connections, len(captures), CAPTURES_KEPT)
        self.state.update((packed(STATE_OPEN, to_table(connections)), captures[used].tobytes()))
        due = int(rows_of(connections)["due"].min(initial=NEVER))
        if due != NEVER:
            expiry_ms = -((late_ns - due) // 10**6)
            self.handle.registerTimer(max(watermark_ms + 1, expiry_ms))

    def _parts(self, bucket: int, found: CompletedExchanges, capture_ids: Ids) -> Iterator[Row]:
        """The complete exchanges with their bytes, the topics that they name, and anomalies."""
        options = self.options
        assembly, _ = within(found.assembly, options.time_from_ns, options.time_to_ns)
        if self.table == "anomalies":
            for table in anomaly_tables(assembly, found.sources, capture_ids.tolist(), options):
                yield _part(bucket, RowKind.TABLE, packed(self.table, table))
        rows = np.arange(len(assembly.exchanges))
        chosen = exchange_index.take(assembly, rows)
        sources = found.sources.carrying(chosen.carried.data)
        infer(chosen, sources)
        topics = learn_topics(chosen, sources)
        facts = Cluster(topics).to_bytes()
        # a bucket without connections now may have some later, with ids of these topics
        for other in range(BUCKETS) if topics.first else ():
            yield _part(other, RowKind.FACTS, facts)
        slot = np.zeros(len(rows), np.int64)
        for _, part in exchange_index.parts(chosen, slot, ROW_BYTES_MAX):
            data = np.frombuffer(exchange_index.to_bytes(part), np.uint8)
            yield _part(bucket, RowKind.EXCHANGES, pack([capture_ids, data]))

    def _notes(self, bucket: int, counts: Counts, faults: list[AnomalyRow]) -> Iterator[Row]:
        """Faults of files, packets that came too late, and limits."""
        limits = counts.given_up + counts.limited
        found = {"late_packets": counts.late, "carry_limits": limits}
        faults += count_anomalies(found)
        if faults:
            yield _faults_part(bucket, self.table, faults, **found)


def _unpacked(data: bytes) -> list[OpenConnection]:
    try:
        return from_table(unpacked(data)[1])
    except (OSError, ValueError) as error:
        reason = "the checkpoint is another version's; begin with a new one"
        raise CaptureError(f"{reason} ({error})") from error


def _new_packets(
    parts: list[bytes], captures: Rows
) -> tuple[SegmentBatch, Bytes, Rows, list[AnomalyRow]]:
    """(the new packets of all parts, their bytes, the captures with their last packets, new faults
    of files).

    A capture may have been read twice, so a part leaves out packets up to the last known one.
    """
    captures, faults, read = captures.copy(), [], []
    for part in parts:
        name, endpoints, segments, data = unpack(part, _PART_TYPES)
        path = os.fsdecode(name.tobytes())
        file_id = capture_id(_plain_name(path))
        known = np.flatnonzero(captures["file_id"] == file_id)
        if not len(known):
            known = np.array([len(captures)])
            captures = np.append(captures, np.array([(file_id, 0, 0, 0)], CAPTURE))
        source = int(known[0])
        captures["capture_id"][source] = capture_id(path)
        if len(segments):
            segments["source"] = source
            read.append((source, int(segments["packet"][0]), endpoints, segments, data))
        elif not captures["has_fault"][source]:
            captures["has_fault"][source] = 1
            kind, detail = json.loads(data.tobytes())
            faults.append(AnomalyRow(Anomaly(kind), detail, capture_id(path)))
    pairs, counts, rows, size = [], [], [np.zeros(0, SEGMENT)], 0
    read.sort(key=lambda one: one[:2])
    for source, _, endpoints, segments, data in read:
        last = captures["last_packet"][source]
        new = segments[segments["packet"] > last]
        captures["last_packet"][source] = new["packet"].max(initial=last)
        new["pos"] += CARRIED_FROM + size
        size += len(data)
        pairs.append(endpoints)
        counts.append(len(new))
        rows.append(new)
    pairs, counts = [np.zeros(0, ENDPOINTS), *pairs], [0, *counts]
    batch = SegmentBatch.numbered(pairs, counts, np.concatenate(rows))
    data = np.concatenate([np.zeros(0, np.uint8), *(one[-1] for one in read)])
    return batch, data, captures, faults


def _plain_name(path: str) -> str:
    """The name of a capture before it was compressed, as `tcpdump -z` does."""
    stem, suffix = os.path.splitext(path)
    return stem if suffix in _COMPRESSED else path


# -- exchanges to rows ----------------------------------------------------------------------


class _Messages(StatefulProcessor):
    """Decodes the exchanges of a bucket. State: the topics that messages of any bucket named."""

    def __init__(self, table: str, options: Options) -> None:
        self.table, self.options = table, options

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getValueState("topics", "topics binary")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        saved = self.state.get()
        cluster = Cluster.from_bytes(saved[0]) if saved else Cluster()
        topics = cluster.topics
        known, exchanges, left_out = len(topics.first), [], set()
        for row in rows:
            if row.kind == RowKind.FACTS:
                found = Cluster.from_bytes(row.data)
                if len(topics.first) < TOPICS_MAX:
                    cluster.merge(found)
                else:
                    left_out |= found.topics.first.keys() - topics.first.keys()
            elif row.kind == RowKind.TABLE:
                yield row
            elif row.kind == RowKind.EXCHANGES:
                exchanges.append(row.data)
        if len(topics.first) > known:
            self.state.update((cluster.to_bytes(),))
        if left_out and key[0] == 0:  # all buckets have the same
            detail = f"{len(left_out)} topics beyond {TOPICS_MAX} are not remembered"
            limit = [AnomalyRow(Anomaly.LIMIT, detail)]
            yield _faults_part(0, self.table, limit, topics_left_out=len(left_out))
        names = topics.names()
        for data in exchanges:
            for table in self._decoded(data, names):
                yield _part(key[0], RowKind.TABLE, packed(self.table, table))

    def _decoded(self, data: bytes, names: TopicNames) -> list[pa.Table]:
        ids, packed = unpack(data, (np.dtype(np.int64), np.dtype(np.uint8)))
        assembly = exchange_index.from_bytes(packed.tobytes())
        sources = Sources([]).carrying(assembly.carried.data)
        tables: list[pa.Table] = []

        def sink(name: str, table: pa.Table) -> None:
            if name == self.table:
                tables.append(table)

        rows = chunks_in_time(assembly.exchanges)
        chunks = decoded_chunks(assembly, sources, rows, ids, names, self.options)
        write_chunks(chunks, TableOutput(self.options, sink), Collector(1))
        return tables


def _part(bucket: int, kind: int, data: bytes, **counts: int) -> Row:
    """counts: of _COUNTS; those that are missing are 0."""
    return Row(bucket=bucket, kind=int(kind), data=data, **(dict.fromkeys(_COUNTS, 0) | counts))


def _faults_part(bucket: int, table: str, faults: list[AnomalyRow], **counts: int) -> Row:
    """Rows of `anomalies` if that is the table, and the counts in any case."""
    rows = packed(table, anomalies_table(faults)) if table == "anomalies" else b""
    return _part(bucket, RowKind.TABLE, rows, **counts)


def _rows_stage(schema: pa.Schema) -> Callable[[Batches], Batches]:
    def stage(batches: Batches) -> Batches:
        for batch in batches:
            for data in batch.column("data").to_pylist():
                if data:
                    _, table = unpacked(data)
                    yield from plain(table, schema).to_batches(max_chunksize=65_536)

    return stage

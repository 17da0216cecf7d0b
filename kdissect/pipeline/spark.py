"""The run on Spark: four mapInArrow stages with explicit partitioning.

    spark.range(splits).mapInArrow(scan)
      -> repartition by bucket, sorted -> mapInArrow(assemble)
      -> repartition by slot, sorted   -> mapInArrow(decode, writes staged Parquet)
      -> repartition by key of events  -> mapInArrow(analyse, writes staged Parquet)
      -> collect: one small row of file names per task

The shuffle moves an index of the exchanges, packed into binary values of at most 4 MB. If a capture
is one split and one slot, one task does all steps, because a stage would cost more than its work.
The run uses the caller's session. It needs no launch-time settings and no SparkContext, so Spark
Connect works too.
"""

from __future__ import annotations

import gc
import json
import logging
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain, groupby
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kdissect import memory_maps
from kdissect.capture import object_store
from kdissect.capture.object_splits import Piece, Runner, Walked, walk_piece
from kdissect.pipeline import local
from kdissect.pipeline.analyse import analyse
from kdissect.pipeline.assemble import assemble
from kdissect.pipeline.decode import decode
from kdissect.pipeline.run_plan import RunPlan, tasks
from kdissect.pipeline.saved_state import StateFiles
from kdissect.pipeline.scan import scan
from kdissect.pipeline.spark_jobs import job_errors
from kdissect.pipeline.spark_session import parallelism
from kdissect.pipeline.step_rows import Row, RowKind
from kdissect.pipeline.table_writer import ParquetSink, StagedFile
from kdissect.step_log import logged_step

_log = logging.getLogger(__name__)

ROWS = "key long, kind int, ord long, data binary"
RESULTS = "result string"
_SCHEMA = pa.schema(
    [("key", pa.int64()), ("kind", pa.int32()), ("ord", pa.int64()), ("data", pa.binary())]
)
Batches = Iterator[pa.RecordBatch]
Stage = Callable[[Batches], Batches]


def run(
    spark: SparkSession, plan: RunPlan, out: str, run_id: str
) -> tuple[list[StagedFile], dict[str, Any]]:
    """Run all stages; returns (staged files of successful attempts, sums of the timings)."""
    began = time.perf_counter()
    with logged_step(_log, "Spark job") as counts, job_errors(spark, plan):
        results = [json.loads(row.result) for row in _stages(spark, plan, out, run_id).collect()]
        counts["results"] = len(results)
    files = [StagedFile(**file) for result in results for file in result["files"]]
    summed = local.summed(results)
    summed["timings"]["stages_s"] = time.perf_counter() - began
    return files, summed


def _stages(spark: SparkSession, plan: RunPlan, out: str, run_id: str) -> DataFrame:
    """The whole job. Each row of its last stage is the result of a task, as JSON."""
    places = (*plan.paths, out)
    if len(plan.splits) <= 1 and plan.slot_count == 1:
        whole_stage = _far(_whole_stage(plan, out, run_id), *places)
        return spark.range(0, 1, 1, 1).mapInArrow(whole_stage, RESULTS)
    scan_stage = _far(_scan_stage(plan), *places)
    assemble_stage = _far(_assemble_stage(plan, StateFiles(out, run_id)), *places)
    decode_stage = _far(_decode_stage(plan, out, run_id), *places)
    analyse_stage = _far(_analyse_stage(plan, out, run_id), *places)

    splits = plan.split_count
    buckets = min(plan.bucket_count, max(1, tasks(plan.byte_count, parallelism(spark))))
    scanned = spark.range(0, splits, 1, max(1, splits)).mapInArrow(scan_stage, ROWS)
    assembled = _by_key(scanned, buckets).mapInArrow(assemble_stage, ROWS)
    decoded = _by_key(assembled, plan.slot_count).mapInArrow(decode_stage, ROWS)
    if plan.before is not None and plan.before.event_files:
        files = len(plan.before.event_files)
        numbers = spark.range(0, files, 1, min(files, buckets))
        decoded = decoded.union(numbers.mapInArrow(_events_stage(plan), ROWS))
    return _by_key(decoded, plan.event_key_count).mapInArrow(analyse_stage, RESULTS)


# -- stages --------------------------------------------------------------------------------


def _scan_stage(plan: RunPlan) -> Stage:
    def stage(batches: Batches) -> Batches:
        _enter("scan")
        sources = plan.sources()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _batches(scan(plan, sources, number))
        _settle("scan")

    return stage


def _assemble_stage(plan: RunPlan, files: StateFiles) -> Stage:
    def stage(batches: Batches) -> Batches:
        _enter("assemble")
        for group in _groups(_rows(batches)):
            # a mapping per bucket: a task may have many buckets, with bytes from all over the
            # captures
            yield from _batches(assemble(plan, plan.sources(), group, files))
        _settle("assemble")

    return stage


def _decode_stage(plan: RunPlan, out: str, run_id: str) -> Stage:
    def stage(batches: Batches) -> Batches:
        _enter("decode")
        # Spark may place several slots in one task; each is decoded by itself.
        for _, rows in groupby(_rows(batches), key=lambda row: row.key):
            yield from _batches(_decoded(plan, rows, out, run_id))
        _settle("decode")

    return stage


def _decoded(plan: RunPlan, rows: Iterator[Row], out: str, run_id: str) -> Iterator[Row]:
    """Rows of the decode step; its result also names the files that it staged."""
    first = next(rows)
    sink = ParquetSink(out, run_id, f"s{first.key:05d}")
    rows = chain([first], rows)
    files = StateFiles(out, run_id) if plan.keeps else None
    for row in decode(plan, plan.sources(), rows, sink, files):
        if row.kind == RowKind.RESULT:
            result = json.loads(row.data)
            result["files"] = [asdict(file) for file in sink.close()]
            row = row._replace(data=json.dumps(result).encode())
        yield row


def _events_stage(plan: RunPlan) -> Stage:
    """Yield the events of the set's earlier captures."""

    def stage(batches: Batches) -> Batches:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from _batches(local.earlier_events(plan, number))

    return stage


def _analyse_stage(plan: RunPlan, out: str, run_id: str) -> Stage:
    def stage(batches: Batches) -> Batches:
        _enter("analyse")
        for group in _groups(_rows(batches)):
            events: list[bytes] = []
            key = 0
            for row in group:
                key = row.key
                if row.kind == RowKind.RESULT:
                    yield pa.RecordBatch.from_pydict({"result": [row.data.decode()]})
                else:
                    events.append(row.data)
            if events:
                sink = ParquetSink(out, run_id, f"e{key:05d}", is_final=not plan.keeps)
                result = analyse(events, sink)
                result["files"] = [asdict(file) for file in sink.close()]
                yield pa.RecordBatch.from_pydict({"result": [json.dumps(result)]})
        _settle("analyse")

    return stage


def _whole_stage(plan: RunPlan, out: str, run_id: str) -> Stage:
    """All steps in one task, for a capture with one split and one slot."""

    def stage(batches: Batches) -> Batches:
        for _ in batches:
            files, result = local.staged_run(plan, out, run_id)
            result["files"] = [asdict(file) for file in files]
            yield pa.RecordBatch.from_pydict({"result": [json.dumps(result)]})
        _settle("whole")

    return stage


def _far(stage: Stage, *places: str) -> Stage:
    """Let a stage read and write object stores with the driver's settings, if `places` has any."""
    if not any(map(object_store.is_remote, places)):
        return stage
    settings = object_store.settings()

    def with_settings(batches: Batches) -> Batches:
        object_store.use(settings)
        yield from stage(batches)

    return with_settings


def _by_key(frame: DataFrame, count: int) -> DataFrame:
    """Repartition by key, with keys spread evenly and rows sorted as the steps expect."""
    if count == 1:
        placed = frame.repartition(1)
    elif hasattr(frame, "repartitionById"):
        placed = frame.repartitionById(count, F.expr(f"cast(key % {count} as int)"))
    else:
        placed = frame.repartition(count, "key")
    return placed.sortWithinPartitions("key", "kind", "ord")


def _rows(batches: Batches) -> Iterator[Row]:
    for batch in batches:
        columns = [batch.column(name) for name in _SCHEMA.names]
        for row in range(batch.num_rows):  # one at a time, because they are megabytes
            yield Row(*(column[row].as_py() for column in columns))


def _batches(rows: Iterator[Row]) -> Batches:
    for row in rows:
        yield pa.RecordBatch.from_arrays(
            [
                pa.array([row.key], pa.int64()),
                pa.array([int(row.kind)], pa.int32()),
                pa.array([row.order], pa.int64()),
                pa.array([row.data], pa.binary()),
            ],
            schema=_SCHEMA,
        )


def _groups(rows: Iterator[Row]) -> Iterator[Iterator[Row]]:
    """Yield the consecutive rows of one key, without collecting them."""
    for _, group in groupby(rows, key=lambda row: row.key):
        yield group


_settled: set[str] = set()
_stage_here = [""]  # name of the last stage in this process


def _enter(stage: str) -> None:
    """Free memory that an earlier stage left: its blocks have other sizes than this stage needs."""
    if _stage_here[0] != stage:
        _stage_here[0] = stage
        memory_maps.trim_heap()


def _settle(stage: str) -> None:
    """After the first task of a stage, exclude loaded objects from garbage collection.

    Spark's daemon runs a full collection after every task, which visits all objects of numba,
    pyarrow and the definitions: 60 ms of a task of 100 ms.
    """
    if stage not in _settled:
        _settled.add(stage)
        gc.collect()
        gc.freeze()


def walk_pieces(spark: SparkSession) -> Runner:
    """A function that walks through pieces of objects in stores, as tasks of a Spark job."""

    def run(pieces: Sequence[Piece]) -> list[Walked]:
        def stage(batches: Batches) -> Batches:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    data = pickle.dumps(walk_piece(pieces[number]))
                    yield pa.RecordBatch.from_pydict({"number": [number], "data": [data]})
            _settle("walk")

        numbers = spark.range(0, len(pieces), 1, len(pieces))
        walked = _far(stage, *(piece.url for piece in pieces))
        with job_errors(spark):
            rows = numbers.mapInArrow(walked, "number long, data binary").collect()
        return [pickle.loads(row.data) for row in sorted(rows, key=lambda row: row.number)]

    return run

"""The run on Spark: two jobs of two mapInArrow stages each, with explicit partitioning.

    spark.range(tasks).mapInArrow(scan)
      -> repartition by bucket, sorted -> mapInArrow(assemble) -> persist
      -> collect: one small row of counts and one of facts per task
    the persisted rows
      -> repartition by slot, sorted   -> mapInArrow(decode, writes staged Parquet)
      -> repartition by key of events  -> mapInArrow(analyse, writes staged Parquet)
      -> collect: one small row of file names per task

Between the jobs the driver merges the facts of all tasks, which every decode task needs.
The shuffle moves an index of the exchanges, packed into binary values of at most 4 MB. For a small
input one task does all steps, because a stage would cost more than its work (`plan`).
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
from itertools import groupby
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kdissect import memory_maps
from kdissect.capture import object_store
from kdissect.pipeline import local
from kdissect.pipeline.analyse import analyse
from kdissect.pipeline.assemble import assemble
from kdissect.pipeline.decode import decode
from kdissect.pipeline.learn import Cluster
from kdissect.pipeline.plan import Runner, RunPlan
from kdissect.pipeline.run_tables import RunSummary, write_run_tables
from kdissect.pipeline.saved_state import earlier_events
from kdissect.pipeline.scan import scan
from kdissect.pipeline.spark_jobs import job_errors
from kdissect.pipeline.step_rows import RUN, Row, RowKind
from kdissect.pipeline.table_writer import ParquetSink, StagedFile
from kdissect.step_log import logged_step

_log = logging.getLogger(__name__)

ROWS = "key long, kind int, ord long, data binary"
RESULTS = "result string"
CALLS = "number long, data binary"
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
    sink = ParquetSink(out, run_id, "run")
    results: list[dict[str, Any]] = []
    if plan.task_count == 1:
        whole = _mapped(spark.range(0, 1, 1, 1), _whole_stage(plan, out, run_id), RESULTS)
        results += _results(spark, plan, whole)
    else:
        assembled = _assembled(spark, plan).persist()
        try:
            with logged_step(_log, "scan and assemble"), job_errors(spark, plan):
                collected = assembled.where(f"key = {RUN}").collect()
            summary = RunSummary.of(Row(*row) for row in collected)
            results.append(write_run_tables(plan, summary, sink))
            decoded = _decoded(spark, plan, summary.facts, assembled, out, run_id)
            results += _results(spark, plan, decoded)
        finally:
            assembled.unpersist()
    files = [StagedFile(**file) for result in results for file in result.get("files", ())]
    summed = local.summed(results)
    summed["timings"]["stages_s"] = time.perf_counter() - began
    return [*files, *sink.close()], summed


def _results(spark: SparkSession, plan: RunPlan, frame: DataFrame) -> list[dict[str, Any]]:
    """Run the last stage; returns the results of its tasks."""
    with logged_step(_log, "decode and analyse"), job_errors(spark, plan):
        return [json.loads(row.result) for row in frame.collect()]


def _assembled(spark: SparkSession, plan: RunPlan) -> DataFrame:
    """Rows of the assemble step."""
    scans = len(plan.scan_bounds) - 1
    scanned = _mapped(spark.range(0, scans, 1, scans), _scan_stage(plan), ROWS)
    buckets = _by_key(scanned, plan.bucket_count, plan.task_count)
    return _mapped(buckets, _assemble_stage(plan), ROWS)


def _decoded(
    spark: SparkSession, plan: RunPlan, facts: Cluster, assembled: DataFrame, out: str,
    run_id: str,
) -> DataFrame:  # fmt: skip
    """Results of the tasks that decode and analyse, as JSON."""
    tasks = plan.task_count
    slots = _by_key(assembled.where(f"key != {RUN}"), plan.slot_count, tasks)
    decoded = _mapped(slots, _decode_stage(plan, facts, out, run_id), ROWS)
    if plan.before is not None and plan.before.event_files:
        files = len(plan.before.event_files)
        numbers = spark.range(0, files, 1, min(files, tasks))
        decoded = decoded.union(_mapped(numbers, _events_stage(plan), ROWS))
    keys = _by_key(decoded, plan.event_key_count, tasks)
    return _mapped(keys, _analyse_stage(plan, out, run_id), RESULTS)


# -- stages --------------------------------------------------------------------------------


def _scan_stage(plan: RunPlan) -> Stage:
    def stage(batches: Batches) -> Batches:
        _enter("scan")
        sources = plan.sources()
        for batch in batches:
            for task in batch.column(0).to_pylist():
                for number in range(plan.scan_bounds[task], plan.scan_bounds[task + 1]):
                    yield from map(_batch, scan(plan, sources, number))
        _settle("scan")

    return stage


def _assemble_stage(plan: RunPlan) -> Stage:
    def stage(batches: Batches) -> Batches:
        _enter("assemble")
        of_run: list[Row] = []
        for key, group in groupby(_rows(batches), key=lambda row: row.key):
            if key == RUN:
                of_run += group
                continue
            # a mapping per bucket: a task may have many buckets, with bytes from all over the
            # captures
            for row in assemble(plan, plan.sources(), group):
                if row.key == RUN:
                    of_run.append(row)
                else:
                    yield _batch(row)
        yield from map(_batch, RunSummary.of(of_run).rows())
        _settle("assemble")

    return stage


def _decode_stage(plan: RunPlan, facts: Cluster, out: str, run_id: str) -> Stage:
    def stage(batches: Batches) -> Batches:
        _enter("decode")
        results = []
        sink: ParquetSink | None = None
        row = None
        for slot, rows in groupby(_rows(batches), key=lambda row: row.key):
            sink = sink or ParquetSink(out, run_id, f"s{slot:05d}")
            for row in decode(plan, facts, plan.sources(), rows, sink):
                if row.kind == RowKind.RESULT:
                    results.append(json.loads(row.data))
                else:
                    yield _batch(row)
        if sink is not None and row is not None:
            result = local.summed(results)
            result["files"] = [asdict(file) for file in sink.close()]
            yield _batch(row._replace(data=json.dumps(result).encode()))
        _settle("decode")

    return stage


def _events_stage(plan: RunPlan) -> Stage:
    """Yield the events of the set's earlier captures."""

    def stage(batches: Batches) -> Batches:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from map(_batch, earlier_events(plan, number))

    return stage


def _analyse_stage(plan: RunPlan, out: str, run_id: str) -> Stage:
    def stage(batches: Batches) -> Batches:
        _enter("analyse")
        for key, group in groupby(_rows(batches), key=lambda row: row.key):
            events: list[bytes] = []
            for row in group:
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


def _mapped(frame: DataFrame, stage: Stage, schema: str) -> DataFrame:
    """The rows that a stage makes of a frame's, with the driver's settings of object stores."""
    settings = object_store.settings()

    def with_settings(batches: Batches) -> Batches:
        object_store.use(settings)
        yield from stage(batches)

    return frame.mapInArrow(with_settings, schema)


def _by_key(frame: DataFrame, keys: int, tasks: int) -> DataFrame:
    """Repartition by key, consecutive keys for each task, sorted as the steps expect."""
    per_task = -(-keys // tasks)
    task = F.expr(f"cast(key div {per_task} as int)")
    placed = frame.repartitionById(-(-keys // per_task), task)
    return placed.sortWithinPartitions("key", "kind", "ord")


def _rows(batches: Batches) -> Iterator[Row]:
    for batch in batches:
        columns = [batch.column(name) for name in _SCHEMA.names]
        for row in range(batch.num_rows):  # one at a time, because they are megabytes
            yield Row(*(column[row].as_py() for column in columns))


def _batch(row: Row) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            pa.array([row.key], pa.int64()),
            pa.array([int(row.kind)], pa.int32()),
            pa.array([row.order], pa.int64()),
            pa.array([row.data], pa.binary()),
        ],
        schema=_SCHEMA,
    )


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


def in_tasks(spark: SparkSession) -> Runner:
    """A function that makes calls in tasks of a Spark job, one for each item."""

    def run(call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        def stage(batches: Batches) -> Batches:
            for batch in batches:
                for number, item in zip(*(column.to_pylist() for column in batch), strict=True):
                    data = pickle.dumps(call(pickle.loads(item)))
                    yield pa.RecordBatch.from_pydict({"number": [number], "data": [data]})
            _settle("call")

        rows = [(number, pickle.dumps(item)) for number, item in enumerate(items)]
        frame = spark.createDataFrame(rows, CALLS)
        frame = frame.repartitionById(len(items), F.expr("cast(number as int)"))
        with job_errors(spark):
            results = _mapped(frame, stage, CALLS).collect()
        return [pickle.loads(row.data) for row in sorted(results, key=lambda row: row.number)]

    return run

"""The run on Spark: two jobs of two mapInArrow stages each, with explicit partitioning.

    (a row of units for each task).mapInArrow(scan)
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
from kdissect.pipeline.assemble import assemble
from kdissect.pipeline.decode import analyse, decode
from kdissect.pipeline.learn import Cluster
from kdissect.pipeline.plan import Runner, RunPlan
from kdissect.pipeline.run_tables import RunSummary, write_run_tables
from kdissect.pipeline.saved_state import earlier_events
from kdissect.pipeline.scan import scan
from kdissect.pipeline.spark_session import job_errors
from kdissect.pipeline.step_rows import RUN, Row, RowKind
from kdissect.pipeline.table_writer import ParquetSink, StagedFile
from kdissect.step_log import logged_step

ROWS = "key long, kind int, ord long, data binary"
RESULTS = "result string"
ITEMS = "number long, data binary"
_SCHEMA = pa.schema(
    [("key", pa.int64()), ("kind", pa.int32()), ("ord", pa.int64()), ("data", pa.binary())]
)
Batches = Iterator[pa.RecordBatch]


def run(
    spark: SparkSession, plan: RunPlan, out: str, run_id: str
) -> tuple[list[StagedFile], dict[str, Any]]:
    """Run all stages; returns (staged files of successful attempts, sums of the timings)."""
    began = time.perf_counter()
    sink = ParquetSink(out, run_id, "run")
    results: list[dict[str, Any]] = []
    if plan.task_count == 1:
        whole = _mapped(spark.range(0, 1, 1, 1), RESULTS, _whole, plan, out, run_id)
        results += _results(spark, plan, whole)
    else:
        assembled = _assembled(spark, plan).persist()
        try:
            with logged_step("scan and assemble"), job_errors(spark, plan):
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
    with logged_step("decode and analyse"), job_errors(spark, plan):
        return [json.loads(row.result) for row in frame.collect()]


def _assembled(spark: SparkSession, plan: RunPlan) -> DataFrame:
    """Rows of the assemble step."""
    scanned = _mapped(_task_items(spark, plan.scan_tasks()), ROWS, _scan, plan.for_tasks())
    buckets = _by_key(scanned, plan.bucket_count, plan.task_count)
    return _mapped(buckets, ROWS, _assemble, plan.for_tasks())


def _decoded(
    spark: SparkSession, plan: RunPlan, facts: Cluster, assembled: DataFrame, out: str,
    run_id: str,
) -> DataFrame:  # fmt: skip
    """Results of the tasks that decode and analyse, as JSON."""
    plan = plan.for_tasks()
    tasks = plan.task_count
    slots = _by_key(assembled.where(f"key != {RUN}"), plan.slot_count, tasks)
    decoded = _mapped(slots, ROWS, _decode, plan, facts, out, run_id)
    if plan.before is not None and plan.before.event_files:
        files = len(plan.before.event_files)
        numbers = spark.range(0, files, 1, min(files, tasks))
        decoded = decoded.union(_mapped(numbers, ROWS, _events, plan))
    keys = _by_key(decoded, plan.event_key_count, tasks)
    return _mapped(keys, RESULTS, _analyse, plan, out, run_id)


# -- stages --------------------------------------------------------------------------------


def _mapped(
    frame: DataFrame, schema: str, stage: Callable[..., Batches], *values: Any
) -> DataFrame:
    """The batches `stage(batches, *values)` of each task, with the driver's settings of object
    stores."""
    settings = object_store.settings()

    def task(batches: Batches) -> Batches:
        object_store.use(settings)
        _enter(stage.__name__)
        yield from stage(batches, *values)
        _settle(stage.__name__)

    return frame.mapInArrow(task, schema)


def _scan(batches: Batches, plan: RunPlan) -> Batches:
    sources = plan.sources()
    for batch in batches:
        for data in batch.column("data").to_pylist():
            for number, unit in pickle.loads(data):
                yield from map(_batch, scan(plan, sources, number, unit))


def _assemble(batches: Batches, plan: RunPlan) -> Batches:
    of_run: list[Row] = []
    for key, group in groupby(_rows(batches), key=lambda row: row.key):
        if key == RUN:
            of_run += group
            continue
        # a mapping per bucket: a task may have many buckets, with bytes from all over the captures
        for row in assemble(plan, plan.sources(), group):
            if row.key == RUN:
                of_run.append(row)
            else:
                yield _batch(row)
    yield from map(_batch, RunSummary.of(of_run).rows())


def _decode(batches: Batches, plan: RunPlan, facts: Cluster, out: str, run_id: str) -> Batches:
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
        data = _with_files(local.summed(results), sink.close())
        yield _batch(row._replace(data=data.encode()))


def _events(batches: Batches, plan: RunPlan) -> Batches:
    """Yield the events of the set's earlier captures."""
    for number in _numbers(batches):
        yield from map(_batch, earlier_events(plan, number))


def _analyse(batches: Batches, plan: RunPlan, out: str, run_id: str) -> Batches:
    for key, group in groupby(_rows(batches), key=lambda row: row.key):
        events: list[bytes] = []
        for row in group:
            if row.kind == RowKind.RESULT:
                yield _result(row.data.decode())
            else:
                events.append(row.data)
        if events:
            sink = ParquetSink(out, run_id, f"e{key:05d}", is_final=not plan.keeps)
            result = analyse(events, sink)
            yield _result(_with_files(result, sink.close()))


def _whole(batches: Batches, plan: RunPlan, out: str, run_id: str) -> Batches:
    """All steps in one task, for a capture with one split and one slot."""
    for _ in batches:
        files, result = local.staged_run(plan, out, run_id)
        yield _result(_with_files(result, files))


def _with_files(result: dict[str, Any], files: list[StagedFile]) -> str:
    """A task's result as JSON."""
    return json.dumps({**result, "files": [asdict(file) for file in files]})


def _result(result: str) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"result": [result]})


def _numbers(batches: Batches) -> Iterator[int]:
    """The numbers of a task's rows of `spark.range`."""
    for batch in batches:
        yield from batch.column(0).to_pylist()


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


def _task_items(spark: SparkSession, items: Sequence[Any]) -> DataFrame:
    """Pickled items, one for each task."""
    rows = [(number, pickle.dumps(item)) for number, item in enumerate(items)]
    frame = spark.createDataFrame(rows, ITEMS)
    return frame.repartitionById(len(items), F.expr("cast(number as int)"))


def in_tasks(spark: SparkSession) -> Runner:
    """A function that makes calls in tasks of a Spark job, one for each item."""

    def run(call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        with job_errors(spark):
            results = _mapped(_task_items(spark, items), ITEMS, _call, call).collect()
        return [pickle.loads(row.data) for row in sorted(results, key=lambda row: row.number)]

    return run


def _call(batches: Batches, call: Callable[[Any], Any]) -> Batches:
    for batch in batches:
        for number, item in zip(*(column.to_pylist() for column in batch), strict=True):
            data = pickle.dumps(call(pickle.loads(item)))
            yield pa.RecordBatch.from_pydict({"number": [number], "data": [data]})

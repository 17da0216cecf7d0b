"""The run on Spark: two jobs of two mapInArrow stages each, with explicit partitioning.

    (a row of units for each task).mapInArrow(scan)
      -> repartition by bucket, sorted -> mapInArrow(assemble) -> persist
      -> collect: a row about the run per task
    the persisted rows
      -> repartition by slot, sorted   -> mapInArrow(decode, writes staged Parquet)
      -> repartition by key of events  -> mapInArrow(analyse, writes staged Parquet)
      -> collect: a row about the run per task, with the names of its files

Between the jobs the facts of all tasks are merged: those of few tasks by the driver, those of more
than FACT_TASKS in tasks, so that the driver holds each fact once. Every decode task gets their
names, and every task the plan; what grows with the input lies in tables beside the run
(`task_table`).
The shuffle moves an index of the exchanges, packed into binary values of at most 4 MB. For a small
input one task does all steps, because a stage would cost more than its work (`plan`).
The run uses the caller's session. It needs no launch-time settings and no SparkContext, so Spark
Connect works too.
"""

from __future__ import annotations

import gc
import pickle
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kdissect.capture import object_store
from kdissect.capture.segments import SegmentBatch
from kdissect.pipeline import exchange_index, local
from kdissect.pipeline.assemble import assemble
from kdissect.pipeline.decode import analyse, decode
from kdissect.pipeline.learn import KnownNames
from kdissect.pipeline.plan import Item, Result, Runner, RunPlan, TaskPlan
from kdissect.pipeline.run_tables import RunSummary, write_run_tables
from kdissect.pipeline.saved_state import saved_events
from kdissect.pipeline.scan import scan
from kdissect.pipeline.spark_session import job_errors
from kdissect.pipeline.step_rows import RUN, RowKind, StepRow
from kdissect.pipeline.table_writer import ParquetSink
from kdissect.pipeline.task_table import TaskTable, share_in
from kdissect.step_log import logged_step

ROWS = "key long, kind int, ord long, data binary"
_SCHEMA = pa.schema(
    [("key", pa.int64()), ("kind", pa.int32()), ("ord", pa.int64()), ("data", pa.binary())]
)
FACT_TASKS = 16  # of more tasks the driver does not hold all facts: 6.5 MB for 100,000 topics
# How the data of a row becomes bytes, and these the data.
_BYTES = (bytes, bytes)
_PACKED: dict[int, tuple[Callable[..., bytes], Callable[[bytes], object]]] = {
    RowKind.SEGMENTS: (SegmentBatch.to_bytes, SegmentBatch.from_bytes),
    RowKind.EXCHANGES: (exchange_index.to_bytes, exchange_index.from_bytes),
}


def run(spark: SparkSession, plan: RunPlan, out: str, run_id: str) -> RunSummary:
    """Run all stages."""
    began = time.perf_counter()
    summary = RunSummary()
    if plan.task_count == plan.event_key_count == 1:
        one = _frame(spark, [StepRow(0, RowKind.UNITS, 0, b"")])
        whole = _mapped(one, _whole, plan, out, run_id)
        summary += _summary(spark, plan, whole, "run")
    else:
        sink = ParquetSink(out, run_id, "run")
        share = share_in(sink.place, run_id, plan.folder)
        task_plan = plan.for_tasks(share)
        fact_keys = FACT_TASKS if plan.task_count > FACT_TASKS else 0
        scanned = _mapped(_task_rows(spark, plan.scan_rows()), _scan, task_plan)
        buckets = _by_key(scanned, plan.bucket_count, plan.task_count)
        assembled = _mapped(buckets, _assemble, task_plan, fact_keys=fact_keys).persist()
        try:
            summary += _summary(spark, plan, assembled, "scan and assemble")
            if fact_keys:
                facts = assembled.where(f"kind = {RowKind.FACTS:d}")
                merged = _mapped(_by_key(facts, fact_keys, fact_keys), _merge)
                summary += _summary(spark, plan, merged, "merge facts")
            write_run_tables(plan, summary, sink)
            rows = assembled.where(f"kind > {RowKind.FACTS:d}")
            if saved := saved_events(plan):
                rows = rows.union(_frame(spark, saved))
            slots = _by_key(rows, plan.slot_count, plan.task_count)
            known = summary.facts.known_names().for_tasks(share)
            decoded = _mapped(slots, _decode, task_plan, known, out, run_id)
            keys = _by_key(decoded, plan.event_key_count, plan.task_count)
            analysed = _mapped(keys, _analyse, out, run_id)
            summary += _summary(spark, plan, analysed, "decode and analyse")
        finally:
            assembled.unpersist()
        summary.files += sink.close()
    summary.timings["stages_s"] = time.perf_counter() - began
    return summary


def _summary(spark: SparkSession, plan: RunPlan, frame: DataFrame, step: str) -> RunSummary:
    """What the tasks of a stage tell of the run."""
    summary = RunSummary()
    with logged_step(step), job_errors(spark, plan):
        for row in frame.where(f"key = {RUN}").collect():
            summary.add(StepRow(*row))
    return summary


# -- stages --------------------------------------------------------------------------------


def _mapped(
    frame: DataFrame, stage: Callable[..., Iterator[StepRow]], *values: object, fact_keys: int = 0
) -> DataFrame:
    """The rows `stage(rows, *values)` of each task; those about the run become one.

    The tasks have the driver's settings of object stores. fact_keys: as for `RunSummary.rows`.
    """
    settings = object_store.settings()

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        object_store.use(settings)
        summary = RunSummary()
        for row in stage(_rows(batches), *values):
            if row.key == RUN:
                summary.add(row)
            else:
                yield _batch(row)
        yield from map(_batch, summary.rows(fact_keys))
        _settle(stage.__name__)

    return frame.mapInArrow(task, ROWS)


def _scan(rows: Iterator[StepRow], plan: TaskPlan) -> Iterator[StepRow]:
    run_plan = RunPlan.of_task(plan)
    return scan(run_plan, run_plan.sources(), rows)


def _assemble(rows: Iterator[StepRow], plan: TaskPlan) -> Iterator[StepRow]:
    run_plan = RunPlan.of_task(plan)
    for key, group in _groups(rows):
        if key == RUN:
            yield from group
        else:
            # a mapping per bucket: a task may have many, with bytes from all over the captures
            yield from assemble(run_plan, run_plan.sources(), group)


def _merge(rows: Iterator[StepRow]) -> Iterator[StepRow]:
    for row in rows:
        yield row._replace(key=RUN)


def _decode(
    rows: Iterator[StepRow], plan: TaskPlan, names: TaskTable, out: str, run_id: str
) -> Iterator[StepRow]:
    run_plan, known = RunPlan.of_task(plan), KnownNames.of_task(names)
    sink: ParquetSink | None = None
    for slot, group in _groups(rows):
        sink = sink or ParquetSink(out, run_id, f"s{slot:05d}")
        yield from decode(run_plan, known, run_plan.sources(), group, sink)
    if sink is not None:
        yield RunSummary(files=sink.close()).row()


def _analyse(rows: Iterator[StepRow], out: str, run_id: str) -> Iterator[StepRow]:
    sink: ParquetSink | None = None
    for key, group in _groups(rows):
        if key == RUN:
            yield from group
            continue
        sink = sink or ParquetSink(out, run_id, f"e{key:05d}")
        yield from analyse(group, sink)
    if sink is not None:
        yield RunSummary(files=sink.close()).row()


def _whole(rows: Iterator[StepRow], plan: RunPlan, out: str, run_id: str) -> Iterator[StepRow]:
    """All steps in one task, for few bytes: a stage would cost more than its work."""
    for _ in rows:
        yield local.staged_run(plan, out, run_id).row()


def _by_key(frame: DataFrame, keys: int, tasks: int) -> DataFrame:
    """Repartition by key, consecutive keys for each task, sorted as the steps expect."""
    per_task = -(-keys // tasks)
    task = F.expr(f"cast(key div {per_task} as int)")
    placed = frame.repartitionById(-(-keys // per_task), task)
    return placed.sortWithinPartitions("key", "kind", "ord")


def _groups(rows: Iterator[StepRow]) -> Iterator[tuple[int, Iterator[StepRow]]]:
    """Yield the rows of each key."""
    return groupby(rows, key=lambda row: row.key)


def _rows(batches: Iterator[pa.RecordBatch]) -> Iterator[StepRow]:
    for batch in batches:
        for row in range(batch.num_rows):  # one at a time, because they are megabytes
            key, kind, order, data = (column[row].as_py() for column in batch.columns)
            yield StepRow(key, kind, order, _PACKED.get(kind, _BYTES)[1](data))


def _batch(*rows: StepRow) -> pa.RecordBatch:
    columns = zip(*map(_plain, rows), strict=True)
    return pa.record_batch(list(columns), schema=_SCHEMA)


def _plain(row: StepRow) -> tuple[int, int, int, bytes]:
    return row.key, int(row.kind), row.order, _PACKED.get(row.kind, _BYTES)[0](row.data)


_settled: set[str] = set()


def _settle(stage: str) -> None:
    """After the first task of a stage, exclude loaded objects from garbage collection.

    Spark's daemon runs a full collection after every task, which visits all objects of numba,
    pyarrow and the definitions: 60 ms of a task of 100 ms.
    """
    if stage not in _settled:
        _settled.add(stage)
        gc.collect()
        gc.freeze()


def _frame(spark: SparkSession, rows: Sequence[StepRow]) -> DataFrame:
    return spark.createDataFrame(pa.Table.from_batches([_batch(*rows)]))


def _task_rows(spark: SparkSession, rows: Sequence[StepRow]) -> DataFrame:
    """The rows, one for each task; their keys count the tasks."""
    return _frame(spark, rows).repartitionById(len(rows), F.expr("cast(key as int)"))


def in_tasks(spark: SparkSession) -> Runner:
    """A function that makes calls in tasks of a Spark job, one for each item."""

    def run(call: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        rows = [
            StepRow(number, RowKind.UNITS, number, zlib.compress(pickle.dumps(item), 1))
            for number, item in enumerate(items)
        ]
        with job_errors(spark):
            called = _mapped(_task_rows(spark, rows), _call, call)
            results = called.where(f"key != {RUN}").collect()
        results.sort(key=lambda row: row.key)
        return [pickle.loads(zlib.decompress(row.data)) for row in results]

    return run


def _call(rows: Iterable[StepRow], call: Callable[[Item], Result]) -> Iterator[StepRow]:
    for row in rows:
        result = call(pickle.loads(zlib.decompress(row.data)))
        yield row._replace(data=zlib.compress(pickle.dumps(result), 1))

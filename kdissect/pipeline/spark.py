"""The run on Spark: four mapInArrow stages with explicit partitioning. The only pyspark import.

    spark.range(splits).mapInArrow(scan)
      -> repartition by bucket, sorted -> mapInArrow(assemble)
      -> repartition by slot, sorted   -> mapInArrow(decode, writes staged Parquet)
      -> repartition by key of events  -> mapInArrow(analyse, writes staged Parquet)
      -> collect: one small row of file names per task

What is shuffled is an index, packed into binary values of at most 4 MB. A capture that is one split
and one slot takes all steps in one task: a stage costs more than its work there. Works in the
caller's session: needs no launch-time settings and no SparkContext, so Spark Connect is fine too.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import chain, groupby
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kdissect import __version__
from kdissect.capture import object_store, resident
from kdissect.capture.mapped_files import was_cut
from kdissect.capture.object_splits import Piece, Runner, Walked, walk_piece
from kdissect.errors import CaptureError, EnvironmentFailed
from kdissect.pipeline import local
from kdissect.pipeline.analyse import analyse
from kdissect.pipeline.assemble import assemble
from kdissect.pipeline.decode import decode
from kdissect.pipeline.run_plan import RunPlan, tasks
from kdissect.pipeline.saved_state import StateFiles
from kdissect.pipeline.scan import scan
from kdissect.pipeline.step_rows import Row, RowKind
from kdissect.pipeline.table_writer import ParquetSink, StagedFile

ROWS = "key long, kind int, ord long, data binary"
_SCHEMA = pa.schema(
    [("key", pa.int64()), ("kind", pa.int32()), ("ord", pa.int64()), ("data", pa.binary())]
)
Batches = Iterator[pa.RecordBatch]


def session(master: str, conf: dict[str, str], log_path: str | os.PathLike[str]) -> SparkSession:
    """A session of our own: quick to start, four tries per task.

    What the JVM and its workers print goes to the file `log_path`. Raises EnvironmentFailed where
    Spark does not start.
    """
    os.environ["PYSPARK_PYTHON"] = worker_python(master, conf)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "1g",
        # a short run is over before the optimising compiler pays
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto",
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.execution.arrow.maxBytesPerBatch": str(32 << 20),
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.log.level": "WARN",
    }
    if master.startswith("local"):
        settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    settings |= conf
    builder = SparkSession.builder.appName("kdissect").master(_with_retries(master))
    for name, value in settings.items():
        builder = builder.config(name, value)
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        with _stderr_to(descriptor):
            return builder.getOrCreate()
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise EnvironmentFailed(f"Spark did not start: {reason[0]}") from error
    finally:
        os.close(descriptor)


def worker_python(master: str, conf: dict[str, str]) -> str:
    """The Python that a session's workers run: `spark.pyspark.python`, else PYSPARK_PYTHON, else
    the driver's.

    A local master does not look at PYSPARK_PYTHON: its workers run where the driver's Python is.
    """
    named = conf.get("spark.pyspark.python")
    if named is None and not master.startswith("local"):
        named = os.environ.get("PYSPARK_PYTHON")
    return named or sys.executable


@contextmanager
def _stderr_to(descriptor: int) -> Iterator[None]:
    """The JVM inherits our stderr, and writes there what no setting silences: give it a file."""
    sys.stderr.flush()
    saved = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _with_retries(master: str) -> str:
    """local[N] gives a task one try only; local[N,4] retries as clusters do."""
    if master == "local":
        return "local[1,4]"
    if master.startswith("local[") and "," not in master:
        return master[:-1] + ",4]"
    return master


def use_this_python(spark: SparkSession) -> None:
    """Workers of a local session run the caller's Python, unless the caller named another.

    By itself Spark takes the first python3 of PATH, which need not have kdissect.
    """
    context = getattr(spark, "_sc", None)  # none with Spark Connect
    if (
        context is not None
        and context.master.startswith("local")
        and context.pythonExec == "python3"
        and not os.environ.get("PYSPARK_PYTHON")
    ):
        context.pythonExec = sys.executable


def parallelism(spark: SparkSession) -> int:
    """Cores that the session's tasks can use at a time."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:  # Spark Connect has no SparkContext
        return int(spark.conf.get("spark.default.parallelism", "8") or 8)


def _by_key(frame: DataFrame, count: int) -> DataFrame:
    """Rows of a key in one partition, keys spread evenly, sorted as the steps expect."""
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
        for row in range(batch.num_rows):  # one at a time: they are megabytes
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
    """Consecutive rows of one key, without holding them."""
    for _, group in groupby(rows, key=lambda row: row.key):
        yield group


def _cancel(spark: SparkSession) -> None:
    """Stop the tasks of an interrupted run, so that none writes after the clean-up."""
    try:
        context = spark.sparkContext
    except Exception:  # Spark Connect has none; the server ends the query with the call
        return
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        # The interrupt cut a call short: the JVM may drop that connection's successor too, and
        # takes the next one.
        with suppress(Py4JError, OSError):
            context.cancelAllJobs()
            if not context.statusTracker().getActiveStageIds():
                return
        time.sleep(0.05)


_RAISED = re.compile(r"^((?:\w+\.)*\w+(?:Error|Failed|Exception|Interrupt)): (.*)$", re.MULTILINE)


# a module that a worker's Python lacks, a Python that is not there, one of another version
_UNFIT_WORKER = (
    (re.compile(r"^ModuleNotFoundError: (No module named '[^'\n]+')$", re.MULTILINE), "{}"),
    (re.compile(r'Cannot run program "([^"\n]+)"'), "there is no program {}"),
    (re.compile(r"\[PYTHON_VERSION_MISMATCH\] ([^,\n]+)"), "{}"),
)


def _unfit_worker(text: str) -> str | None:
    """What to do about workers that cannot run our tasks; None for any other fault."""
    for pattern, reason in _UNFIT_WORKER:
        if found := pattern.search(text):
            version = "{}.{}".format(*sys.version_info)
            return (
                f"Spark's workers cannot run kdissect: {reason.format(found[1])}; install kdissect "
                f"{__version__} for Python {version} on every worker, or name a Python there that "
                "has it with --conf spark.pyspark.python=PATH (docs/cluster.md)"
            )
    return None


def _job_error(error: Exception) -> Exception:
    """What a failed job means to the user: no room, an input that went away, or a bug of ours."""
    text = str(error)
    if "No space left on device" in text:
        return EnvironmentFailed("no space left on the device; what was there is as it was")
    if unfit := _unfit_worker(text):
        return EnvironmentFailed(unfit)
    raised = [found for found in _RAISED.findall(text) if "spark" not in found[0].lower()]
    kind, reason = raised[-1] if raised else ("", "")
    if kind.endswith("CaptureError"):
        return CaptureError(reason)
    if kind.endswith("EnvironmentFailed"):
        return EnvironmentFailed(reason)
    if kind.endswith(("AssertionError", "ValueError", "TypeError", "IndexError", "KeyError")):
        return error
    first = reason or (text.strip().splitlines() or [type(error).__name__])[0]
    return EnvironmentFailed(f"the Spark job failed: {first}")


def _cut_input(plan: RunPlan) -> EnvironmentFailed | None:
    """Of a capture that was cut while it was mapped, the workers that read on there are dead."""
    for path, size, version in zip(plan.paths, plan.sizes, plan.sources().versions, strict=True):
        found = was_cut(path, size) if version is None else None
        if found is not None:
            return found
    return None


_settled: set[str] = set()
_stage_here = [""]  # of this process's last task


def _enter(stage: str) -> None:
    """Before a task: what the stage before left free is of other sizes than this one needs."""
    if _stage_here[0] != stage:
        _stage_here[0] = stage
        resident.release()


def _settle(stage: str) -> None:
    """After a process's first task of a stage: keep what it loaded out of the collector's sight.

    Spark's daemon runs a full collection after every task, which walks through all objects of
    numba, pyarrow and our definitions each time: 60 ms on a task of 100.
    """
    if stage not in _settled:
        _settled.add(stage)
        gc.collect()
        gc.freeze()


Stage = Callable[[Batches], Batches]


def _far(stage: Stage, *places: str) -> Stage:
    """A stage that reads or writes at `places`; its tasks get to stores as the driver does."""
    if not any(map(object_store.is_remote, places)):
        return stage
    settings = object_store.settings()

    def with_settings(batches: Batches) -> Batches:
        object_store.use(settings)
        yield from stage(batches)

    return with_settings


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
            # mapped for each bucket alone: a task may have many, anywhere in the captures
            yield from _batches(assemble(plan, plan.sources(), group, files))
        _settle("assemble")

    return stage


def _decode_stage(plan: RunPlan, out: str, run_id: str) -> Stage:
    def stage(batches: Batches) -> Batches:
        _enter("decode")
        # Spark may place several slots in one task; each is decoded by itself.
        for slot, rows in groupby(_rows(batches), key=lambda row: row.key):
            yield from _batches(_decoded(plan, rows, slot == plan.open_slot, out, run_id))
        _settle("decode")

    return stage


def _decoded(
    plan: RunPlan, rows: Iterator[Row], is_open: bool, out: str, run_id: str
) -> Iterator[Row]:
    """The rows of the decode step; its result also names the files that it staged."""
    first = next(rows)
    label = "o00000" if is_open else f"s{first.key:05d}"
    sink = ParquetSink(out, run_id, label, is_final=not is_open)
    rows = chain([first], rows)
    files = StateFiles(out, run_id) if plan.keeps else None
    for row in decode(plan, plan.sources(), rows, sink, files):
        if row.kind == RowKind.RESULT:
            result = json.loads(row.data)
            result["files"] = [asdict(file) for file in sink.close()]
            row = row._replace(data=json.dumps(result).encode())
        yield row


def _events_stage(plan: RunPlan) -> Stage:
    """Events of the captures before, for stories that go on."""

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
    """All steps in one task, for a capture that is one split and one slot."""

    def stage(batches: Batches) -> Batches:
        for _ in batches:
            sinks = [ParquetSink(out, run_id, "s00000")]
            lanes = files = None
            if plan.keeps:
                sinks += [ParquetSink(out, run_id, label, is_final=False) for label in "oe"]
                lanes = (sinks[1], sinks[2])
                files = StateFiles(out, run_id)
            result = local.run(plan, sinks[0], lanes, files)
            result["files"] = [asdict(file) for sink in sinks for file in sink.close()]
            yield pa.RecordBatch.from_pydict({"result": [json.dumps(result)]})
        _settle("whole")

    return stage


def walk_pieces(spark: SparkSession) -> Runner:
    """Walks through pieces of objects in stores as tasks of a job."""

    def run(pieces: Sequence[Piece]) -> list[Walked]:
        def stage(batches: Batches) -> Batches:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    data = pickle.dumps(walk_piece(pieces[number]))
                    yield pa.RecordBatch.from_pydict({"number": [number], "data": [data]})
            _settle("walk")

        numbers = spark.range(0, len(pieces), 1, len(pieces))
        try:
            walked = _far(stage, *(piece.url for piece in pieces))
            found = numbers.mapInArrow(walked, "number long, data binary").collect()
        except KeyboardInterrupt:
            _cancel(spark)
            raise
        except Exception as error:
            raise _job_error(error) from error
        return [pickle.loads(row.data) for row in sorted(found, key=lambda row: row.number)]

    return run


def _stages(spark: SparkSession, plan: RunPlan, out: str, run_id: str) -> DataFrame:
    """The job: a row of its last stage is the result of a task, as JSON."""
    places = (*plan.paths, out)
    count = plan.split_count
    numbers = spark.range(0, count, 1, max(1, count))
    if len(plan.splits) <= 1 and plan.slot_count == 1:
        whole = _far(_whole_stage(plan, out, run_id), *places)
        return spark.range(0, 1, 1, 1).mapInArrow(whole, "result string")
    scanned = numbers.mapInArrow(_far(_scan_stage(plan), *places), ROWS)
    count = min(plan.bucket_count, max(1, tasks(plan.byte_count, parallelism(spark))))
    assemble_stage = _far(_assemble_stage(plan, StateFiles(out, run_id)), *places)
    assembled = _by_key(scanned, count).mapInArrow(assemble_stage, ROWS)
    decode_stage = _far(_decode_stage(plan, out, run_id), *places)
    decoded = _by_key(assembled, plan.key_count).mapInArrow(decode_stage, ROWS)
    if plan.before is not None and plan.before.event_files:
        files = len(plan.before.event_files)
        earlier = spark.range(0, files, 1, min(files, count)).mapInArrow(_events_stage(plan), ROWS)
        decoded = decoded.union(earlier)
    analyse_stage = _far(_analyse_stage(plan, out, run_id), *places)
    return _by_key(decoded, plan.event_key_count).mapInArrow(analyse_stage, "result string")


def run(
    spark: SparkSession, plan: RunPlan, out: str, run_id: str
) -> tuple[list[StagedFile], dict[str, Any]]:
    """Run all stages; (staged files of the successful attempts, sums of the timings)."""
    began = time.perf_counter()
    try:
        results = [json.loads(row.result) for row in _stages(spark, plan, out, run_id).collect()]
    except KeyboardInterrupt:
        _cancel(spark)
        raise
    except Exception as error:
        raise _cut_input(plan) or _job_error(error) from error
    files = [StagedFile(**file) for result in results for file in result["files"]]
    summed = local.summed(results)
    summed["timings"]["stages_s"] = time.perf_counter() - began
    return files, summed

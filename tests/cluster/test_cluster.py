"""Many machines: the same rows from a standalone cluster, by spark-submit and Spark Connect."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numba
import pytest

import kdissect
from tests.cluster.harness import SPARK_HOME, Cluster, Process, environment, python_without
from tests.conftest import CAPTURES, ROOT
from tests.objects import object_store
from tests.processes import KDISSECT, Done, run
from tests.truth.rows import set_differences

pytestmark = [pytest.mark.heavy, pytest.mark.spark]
INPUTS = [str(CAPTURES / "librdkafka.pcap"), str(CAPTURES / "sarama.pcap.gz")]
HERE = Path(__file__).parent
CONNECT = "org.apache.spark.sql.connect.service.SparkConnectServer"


@pytest.fixture
def cluster(tmp_path):
    started = Cluster(tmp_path)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def expected():
    return kdissect.read(INPUTS)


def _submit(cluster: Cluster, out: Path | str, *conf: str, inputs: list[str] = INPUTS) -> list[str]:
    settings = [part for item in conf for part in ("--conf", item)]
    return [
        str(SPARK_HOME / "bin" / "spark-submit"), "--master", cluster.url,
        "--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.executor.memory=512m",
        "--conf", f"spark.executorEnv.PYTHONPATH={environment()['PYTHONPATH']}",
        *settings, str(HERE / "job.py"), str(out), *inputs,
    ]  # fmt: skip


DYNAMIC = (
    "spark.dynamicAllocation.enabled=true",
    "spark.dynamicAllocation.shuffleTracking.enabled=true",
    "spark.dynamicAllocation.minExecutors=0",
    "spark.dynamicAllocation.executorIdleTimeout=1s",
)
SPECULATION = (
    "spark.speculation=true",
    "spark.speculation.interval=10ms",
    "spark.speculation.quantile=0.1",
    "spark.speculation.multiplier=1.01",
)


@pytest.mark.parametrize(
    ("conf", "said"),
    [((), "Starting job"), (DYNAMIC, "ExecutorAllocationManager"), (SPECULATION, "speculatable")],
    ids=["plain", "dynamic allocation", "speculation"],
)
def test_spark_submit_gives_the_rows_of_read(cluster, expected, tmp_path, conf, said):
    """A job of spark-submit on a standalone cluster writes the tables of `read()`.

    said: what Spark's log has of a cluster so configured.
    """
    done = _done(cluster, tmp_path / "tables", *conf)
    assert said in done.stderr
    tables = kdissect.open(tmp_path / "tables")
    assert f"exchanges: {tables.exchanges.num_rows}" in done.stdout
    assert set_differences(expected, tables) == []
    assert tables.manifest["options"]["split_bytes"] == 400_000


def _done(cluster: Cluster, out: Path | str, *conf: str, inputs: list[str] = INPUTS) -> Done:
    done = run(*_submit(cluster, out, *conf, inputs=inputs), timeout_s=400, **environment())
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@contextmanager
def _when_busy(job: subprocess.Popen[str], out: Path, do: Callable[[], None]) -> Iterator[None]:
    """Do something once a task has written, or is about to: the worst moment."""
    done = threading.Event()

    def watch() -> None:
        while job.poll() is None:
            if list(out.glob("_staging/**/*.parquet")):
                do()
                done.set()
                return
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield
    watcher.join()
    assert done.is_set()


def _started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def test_a_killed_worker_costs_no_row(cluster, expected, tmp_path):
    """Tasks of a killed worker run again, and the tables have every row once."""
    out = tmp_path / "tables"
    job = _started(_submit(cluster, out))
    with _when_busy(job, out, cluster.workers[0].kill):
        _, stderr = job.communicate(timeout=400)
    assert job.returncode == 0, stderr[-3000:]
    assert set_differences(expected, kdissect.open(out)) == []
    assert not (out / "_staging").exists()


def test_a_killed_driver_starts_again(cluster, expected, tmp_path):
    """The next run removes what the killed one left, and writes every row once."""
    out = tmp_path / "tables"
    job = _started(_submit(cluster, out))
    with _when_busy(job, out, lambda: os.killpg(job.pid, signal.SIGKILL)):
        job.communicate(timeout=400)
    assert job.returncode == -signal.SIGKILL
    with pytest.raises(kdissect.CaptureError, match="no table set"):
        kdissect.open(out)
    _done(cluster, out)
    tables = kdissect.open(out)
    assert set_differences(expected, tables) == []
    listed = {file for entry in tables.manifest["tables"].values() for file in entry["files"]}
    assert {path.relative_to(out).as_posix() for path in out.rglob("*.parquet")} == listed


def test_a_store_that_refuses_a_tenth_of_all_requests(cluster, tmp_path):
    """With 503 and a body: captures and tables in it are as whole as ever."""
    counts = {"all": 0, "refused": 0}

    def fault(*_: object) -> int:
        counts["all"] += 1
        is_refused = counts["all"] % 10 == 0
        counts["refused"] += is_refused
        return 503 if is_refused else 0

    with object_store("busy") as store:
        urls = [store.put(Path(path).name, Path(path)) for path in INPUTS]
        expected, out = kdissect.read(urls), store.url("tables")
        with store.failing(fault):
            _done(cluster, out, inputs=urls)
        assert counts["refused"] > 10
        assert set_differences(expected, kdissect.open(out)) == []


def test_the_python_of_the_workers(cluster, expected, tmp_path):
    """The setting counts before the variable, and the variable before the driver's Python."""
    without = python_without(tmp_path, "kdissect")
    settings = ["spark.driver.host=127.0.0.1", "spark.executor.memory=512m"]

    def dissect(out: str, *settings_more: str, variable: str) -> Done:
        conf = [part for item in (*settings, *settings_more) for part in ("--conf", item)]
        variables = environment() | {"PYSPARK_PYTHON": variable, "TMPDIR": str(tmp_path)}
        command = (*KDISSECT, "dissect", *INPUTS, "--quiet", *conf, "--master", cluster.url)
        return run(*command, "--out", tmp_path / out, **variables)

    for more, variable in (
        ([f"spark.pyspark.python={without}"], sys.executable),
        ([], str(without)),
        (["spark.pyspark.python=/no/python"], sys.executable),
    ):
        failed = dissect("lacking", *more, variable=variable)
        assert failed.returncode == 3, failed.stderr
        (line,) = failed.stderr.splitlines()
        assert line.startswith("kdissect: Spark's workers cannot run kdissect: ")
        assert "--conf spark.pyspark.python=PATH (docs/cluster.md)" in line
        assert not (tmp_path / "lacking").exists()
    done = dissect("set", f"spark.pyspark.python={sys.executable}", variable=str(without))
    assert done.returncode == 0, done.stderr
    assert set_differences(expected, kdissect.open(tmp_path / "set")) == []


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """An archive of an environment with kdissect and its compiled kernels."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    ignored = shutil.ignore_patterns("__pycache__", "machine_code")
    shutil.copytree(ROOT / "kdissect", site / "kdissect", ignore=ignored)
    (site / "dependencies.pth").write_text(f"{Path(numba.__file__).parents[1]}\n")
    compile_all = [str(folder / "bin" / "python"), "-m", "kdissect.compile"]
    subprocess.run(compile_all, check=True, cwd=tmp_path, env=environment(""))
    return Path(shutil.make_archive(str(tmp_path / "packed"), "gztar", folder))


@pytest.mark.timeout(3000)  # compiles all kernels, then starts two applications
def test_a_packed_environment_compiles_nothing(packed, expected, tmp_path):
    """Its kernels serve the executors of the first application and of the next."""
    compiled = tmp_path / "compiled"
    settings = (
        f"spark.archives={packed}#environment",
        "spark.pyspark.python=environment/bin/python",
        f"spark.pyspark.driver.python={sys.executable}",
        f"spark.executorEnv.NUMBA_CACHE_DIR={compiled}",
        "spark.driver.host=127.0.0.1",
        "spark.executor.memory=512m",
    )
    conf = [part for item in settings for part in ("--conf", item)]
    started = Cluster(tmp_path, python_path="")  # so that only the archive has kdissect
    try:
        for number in range(2):
            submit = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", started.url, *conf]
            unset = ("env", "-u", "PYSPARK_PYTHON", "-u", "PYSPARK_DRIVER_PYTHON")
            job = (HERE / "job.py", tmp_path / f"tables-{number}", *INPUTS)
            done = run(*unset, *submit, *job, timeout_s=400, **environment())
            assert done.returncode == 0, done.stderr[-3000:]
            assert f"exchanges: {expected.exchanges.num_rows}" in done.stdout
            assert not compiled.exists() or not list(compiled.iterdir())
    finally:
        started.stop()
    assert list(tmp_path.glob("work-*/app-*/*/environment/bin/python"))


def test_spark_connect_gives_the_rows_of_read(expected, tmp_path):
    """A session of Spark Connect writes the tables of `read()`."""
    pytest.importorskip("grpc", reason="Spark Connect's client is not installed")
    server = Process(
        "org.apache.spark.deploy.SparkSubmit", tmp_path / "connect.log",
        "--class", CONNECT, "--master", "local[2]",
        "--conf", "spark.connect.grpc.binding.port=0",
        "--conf", "spark.connect.grpc.binding.address=127.0.0.1",
        "--conf", "spark.driver.host=127.0.0.1", "spark-internal",
    )  # fmt: skip
    try:
        port = server.wait_for(r"Spark Connect server started at: \S*?:(\d+)")
        out = tmp_path / "tables"
        # a process of its own: one process has no sessions of both kinds
        variables = environment() | {"SPARK_REMOTE": f"sc://127.0.0.1:{port}"}
        run(sys.executable, HERE / "job.py", out, *INPUTS, check=True, **variables)
        assert set_differences(expected, kdissect.open(out)) == []
    finally:
        server.kill()

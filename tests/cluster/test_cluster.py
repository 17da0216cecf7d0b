"""Many machines: the same rows from a standalone cluster, by spark-submit and Spark Connect."""

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numba
import pytest

import kdissect
from tests.cluster.harness import SPARK_HOME, Cluster, Process, environment, python_without
from tests.conftest import CAPTURES, ROOT
from tests.processes import KDISSECT, Done, run

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
    return _counts(kdissect.read(INPUTS))


def _counts(tables: kdissect.Tables) -> dict[str, int]:
    return {name: tables[name].num_rows for name in tables.names}


def _ids(tables: kdissect.Tables) -> list[tuple]:
    rows = tables.exchanges.to_arrow(["exchange_id", "status", "topics"]).to_pylist()
    return sorted(tuple(map(str, row.values())) for row in rows)


def _submit(cluster: Cluster, out: Path, *conf: str) -> list[str]:
    settings = [part for item in conf for part in ("--conf", item)]
    return [
        str(SPARK_HOME / "bin" / "spark-submit"), "--master", cluster.url,
        "--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.executor.memory=512m",
        "--conf", f"spark.executorEnv.PYTHONPATH={environment()['PYTHONPATH']}",
        *settings, str(HERE / "job.py"), str(out), *INPUTS,
    ]  # fmt: skip


def test_spark_submit_gives_the_rows_of_read(cluster, expected, tmp_path):
    """A job of spark-submit on a standalone cluster writes the tables of `read()`."""
    out = tmp_path / "tables"
    done = run(*_submit(cluster, out), **environment())
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"exchanges: {expected['exchanges']}" in done.stdout
    tables = kdissect.open(out)
    assert _counts(tables) == expected
    assert _ids(tables) == _ids(kdissect.read(INPUTS))
    assert tables.manifest["options"]["split_bytes"] == 400_000


def test_a_killed_worker_costs_no_row(cluster, expected, tmp_path):
    """Tasks of a killed worker run again, and the tables have every row once."""
    out = tmp_path / "tables"
    job = subprocess.Popen(
        _submit(cluster, out),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    killed = threading.Event()

    def kill_when_busy() -> None:
        # a task has written, or is about to: the worst moment
        while job.poll() is None:
            if list(out.glob("_staging/**/*.parquet")):
                cluster.workers[0].kill()
                killed.set()
                return
            time.sleep(0.01)

    watcher = threading.Thread(target=kill_when_busy)
    watcher.start()
    stdout, stderr = job.communicate(timeout=400)
    watcher.join()
    assert job.returncode == 0, stderr[-3000:]
    assert killed.is_set()
    assert f"exchanges: {expected['exchanges']}" in stdout
    tables = kdissect.open(out)
    assert _counts(tables) == expected
    assert _ids(tables) == _ids(kdissect.read(INPUTS))
    assert not (out / "_staging").exists()


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
        assert "workers cannot run kdissect" in failed.stderr
        assert len(failed.stderr.splitlines()) == 1
    done = dissect("set", f"spark.pyspark.python={sys.executable}", variable=str(without))
    assert done.returncode == 0, done.stderr
    assert _counts(kdissect.open(tmp_path / "set")) == expected


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
            assert f"exchanges: {expected['exchanges']}" in done.stdout
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
        tables = kdissect.open(out)
        assert _counts(tables) == expected
        assert _ids(tables) == _ids(kdissect.read(INPUTS))
    finally:
        server.kill()

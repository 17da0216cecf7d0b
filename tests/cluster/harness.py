"""A Spark standalone cluster on loopback: a master and workers, processes of their own."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pyspark

from tests.conftest import ROOT

SPARK_HOME = Path(pyspark.__file__).parent
START_S = 60


def environment(python_path: str = str(ROOT)) -> dict[str, str]:
    """For Spark's scripts: this Python, loopback only, the project on the path."""
    return os.environ | {
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": python_path,
    }


class Process:
    """A Java class of Spark's with its log in a file."""

    def __init__(self, name: str, log: Path, *arguments: str, python_path: str = str(ROOT)) -> None:
        self.log = log
        with log.open("wb") as file:
            self.popen = subprocess.Popen(
                [str(SPARK_HOME / "bin" / "spark-class"), name, *arguments],
                stdout=file, stderr=subprocess.STDOUT, env=environment(python_path),
                start_new_session=True,
            )  # fmt: skip

    def wait_for(self, pattern: str) -> str:
        """The first match of a group in the log."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            found = re.search(pattern, self.log.read_text(errors="replace"))
            if found:
                return found[1]
            assert self.popen.poll() is None, self.log.read_text(errors="replace")[-2000:]
            time.sleep(0.1)
        raise AssertionError(f"{pattern} is not in {self.log.read_text(errors='replace')[-2000:]}")

    def kill(self) -> None:
        """At once, without a chance to say goodbye, its children too."""
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, 9)
            self.popen.wait()


class Cluster:
    """One master, `workers` workers of one core each; `python_path`: of their Python processes."""

    def __init__(self, folder: Path, workers: int = 2, python_path: str = str(ROOT)) -> None:
        self.folder = folder
        self.python_path = python_path
        self.processes: list[Process] = []
        try:
            master = self._start(
                "org.apache.spark.deploy.master.Master", "master",
                "--host", "127.0.0.1", "--port", "0", "--webui-port", "0",
            )  # fmt: skip
            self.url = master.wait_for(r"Starting Spark master at (spark://\S+)")
            self.workers = [
                self._start(
                    "org.apache.spark.deploy.worker.Worker", f"worker-{number}",
                    "--host", "127.0.0.1", "--port", "0", "--webui-port", "0", "--cores", "1",
                    "--memory", "1g", "--work-dir", str(folder / f"work-{number}"), self.url,
                )
                for number in range(workers)
            ]  # fmt: skip
            for worker in self.workers:
                worker.wait_for(r"(Successfully registered with master)")
        except BaseException:
            self.stop()
            raise

    def _start(self, name: str, log: str, *arguments: str) -> Process:
        log_file = self.folder / f"{log}.log"
        process = Process(name, log_file, *arguments, python_path=self.python_path)
        self.processes.append(process)
        return process

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.kill()


def python_without(folder: Path, module: str) -> Path:
    """A program that runs this Python as if a module were not installed."""
    package = folder / "hidden" / module
    package.mkdir(parents=True)
    error = f"ModuleNotFoundError(\"No module named '{module}'\", name='{module}')"
    (package / "__init__.py").write_text(f"raise {error}\n")
    program = folder / f"python-without-{module}"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={package.parent}:"$PYTHONPATH" exec {sys.executable} "$@"\n'
    )
    program.chmod(0o755)
    return program

"""--out: the table set of the replay's own traffic, by the pipeline that reads every capture."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kdissect import api
from kdissect.replay.output.results import Results
from kdissect.replay.output.traffic import write_capture


def write_tables(results: Results, out: str) -> None:
    """Write a table set of the requests that the replay sent and the target's responses.

    The run's traffic is first written to a temporary file, so `captures.path` is `replay.pcap`.
    Raises OutputError if `out` cannot be used.
    """
    ports = sorted({record.theirs[1] for record in results.run.links})
    with tempfile.TemporaryDirectory(prefix="kdissect-replay-") as folder:
        path = Path(folder, "replay.pcap")
        write_capture(results.run, path)
        tables = api.read(path, ports=ports)
        tables.write(out)

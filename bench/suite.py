"""The benchmarks: each is a function that measures and returns plain data for the report."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench import inputs
from bench.measure import (
    ROOT,
    Helper,
    MemoryWatch,
    cpu_seconds,
    first_line,
    interleaved,
    median,
    spread,
    timed,
)
from kdissect.codec.compression import CODEC_NAMES

CORES = 2
MASTER = f"local[{CORES},4]"
COPIES = 5
PYTHON = sys.executable
KDISSECT = str(Path(PYTHON).with_name("kdissect"))
OUT = inputs.WORK / "tables"
PORTS = (9092, 9093)
FIELDS = ("kafka.correlation_id", "kafka.api_key", "kafka.topic_name", "kafka.offset")


def _fresh(name: str) -> str:
    path = OUT / name
    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    return str(path)


def _marginal(one: list[float], many: list[float], copies: int = COPIES) -> float:
    return (median(many) - median(one)) / (copies - 1)


# -- time -----------------------------------------------------------------------------------


def marginal(quick: bool) -> dict[str, Any]:
    """Product and floor in turns, on one copy and on five, everything warm."""
    rounds = 3 if quick else 7
    found = {}
    with Helper("product", "--master", MASTER) as product:
        for source in (inputs.record_heavy(), inputs.message_heavy(), inputs.five_codecs()):
            one, five = (str(inputs.copies_of(source, n)) for n in (1, COPIES))
            with Helper("floor", "--workers", str(CORES), one, five) as floor:
                jobs: dict[str, Callable[[], Any]] = {
                    "product_1": lambda: product(path=one, out=_fresh("p1")),  # noqa: B023
                    "product_5": lambda: product(path=five, out=_fresh("p5")),  # noqa: B023
                    "floor_1": lambda: floor(path=one, out=_fresh("f1")),  # noqa: B023
                    "floor_5": lambda: floor(path=five, out=_fresh("f5")),  # noqa: B023
                }
                interleaved(jobs, 2)  # compiled, loaded, in the page cache
                runs = interleaved(jobs, rounds)
            found[source.name] = _compared(source, Path(one), runs)
    return {"rounds": rounds, "inputs": found}


def _compared(source: inputs.Input, one: Path, runs: dict[str, list[Any]]) -> dict[str, Any]:
    seconds = {name: [run["seconds"] for run in done] for name, done in runs.items()}
    product, floor = runs["product_5"], runs["floor_5"]
    own = sum(product[-1]["table_bytes"].values())
    return {
        "title": source.title,
        "file": source.path.name,
        "note": source.note,
        "byte_count": one.stat().st_size,
        "totals": runs["product_1"][-1]["totals"],
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "product_marginal": _marginal(seconds["product_1"], seconds["product_5"]),
        "floor_marginal": _marginal(seconds["floor_1"], seconds["floor_5"]),
        "floor_one": median(seconds["floor_1"]),
        "floor_steps": {
            name: median([run["steps"][name] for run in floor]) for name in floor[0]["steps"]
        },
        "table_bytes": own,
        "floor_bytes": floor[-1]["byte_count"],
        "largest_tables": dict(
            sorted(product[-1]["table_bytes"].items(), key=lambda item: -item[1])[:6]
        ),
        "timings": {
            number: {
                name: median([run["timings"][name] for run in runs[f"product_{number}"]])
                for name in runs[f"product_{number}"][0]["timings"]
            }
            for number in (1, COPIES)
        },
    }


OLD_MAGICS = [(codec, magic) for magic in (0, 1) for codec in CODEC_NAMES[:4]]  # no zstd yet


def codecs(quick: bool) -> dict[str, Any]:
    """Each codec alone, against the floor; the old magics against magic 2. Wall and CPU time."""
    rounds = 3 if quick else 7
    rows = []
    with Helper("product", "--master", MASTER) as product:
        for codec, magic in [(codec, 2) for codec in CODEC_NAMES] + OLD_MAGICS:
            source = inputs.one_codec(codec, magic)
            paths = [str(inputs.copies_of(source, n)) for n in (1, COPIES)]
            jobs = {f"product_{n}": _metered(product, path, "p") for n, path in enumerate(paths)}
            if magic < 2:
                interleaved(jobs, 2)
                rows.append(_codec_row(codec, magic, source, interleaved(jobs, rounds)))
                continue
            with Helper("floor", "--workers", str(CORES), *paths) as floor:
                jobs |= {f"floor_{n}": _metered(floor, path, "f") for n, path in enumerate(paths)}
                interleaved(jobs, 2)
                rows.append(_codec_row(codec, magic, source, interleaved(jobs, rounds)))
    return {"rounds": rounds, "records": 2 * inputs.ONE_CODEC_RECORDS, "rows": rows}


def _metered(helper: Helper, path: str, out: str) -> Callable[[], dict[str, Any]]:
    """A job: a helper's answer, with the processor time of all its processes beside it."""

    def job() -> dict[str, Any]:
        before = cpu_seconds(helper.pid)
        answer: dict[str, Any] = helper(path=path, out=_fresh(out))
        return answer | {"cpu": cpu_seconds(helper.pid) - before}

    return job


def _codec_row(
    codec: str, magic: int, source: inputs.Input, runs: dict[str, list[Any]]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "codec": codec,
        "magic": magic,
        "byte_count": source.path.stat().st_size,
        "table_bytes": sum(runs["product_1"][-1]["table_bytes"].values()),
    }
    for who in ("product", "floor"):
        if f"{who}_0" in runs:
            for what in ("seconds", "cpu"):
                one, five = ([run[what] for run in runs[f"{who}_{n}"]] for n in (0, 1))
                row[f"{who}_{what}"] = _marginal(one, five)
    if magic == 2:
        row["floor_bytes"] = runs["floor_1"][-1]["byte_count"]
    return row


def _command(capture: Path, out: str, *more: str) -> list[str]:
    return [KDISSECT, "dissect", str(capture), "--out", _fresh(out), "--quiet", *more]


def tshark(quick: bool) -> dict[str, Any]:
    """tshark as JSON and as fields: whole processes, one copy and several."""
    if shutil.which("tshark") is None:
        return {"skipped": "tshark is not installed"}
    kinds = {"json": ["-T", "json"], "fields": _fields()}
    copies, rounds = (2, 1) if quick else (COPIES, 3)
    found = {}
    for source in (inputs.record_heavy(), inputs.message_heavy(), inputs.five_codecs()):
        jobs = {
            f"{kind}_{n}": partial(timed, tshark_command(inputs.copies_of(source, n), output))
            for n in (1, copies)
            for kind, output in kinds.items()
        }
        runs = interleaved(jobs, rounds)
        found[source.name] = {
            "title": source.title,
            "byte_count": inputs.copies_of(source, 1).stat().st_size,
            "copies": copies,
            "seconds": {name: spread(values) for name, values in runs.items()},
            **{
                f"{kind}_marginal": _marginal(runs[f"{kind}_1"], runs[f"{kind}_{copies}"], copies)
                for kind in kinds
            },
        }
    return {"rounds": rounds, "inputs": found}


def tshark_command(path: Path, output: list[str]) -> list[str]:
    """tshark over a capture; Kafka's ports are named, so that it need not guess."""
    ports = [part for port in PORTS for part in ("-d", f"tcp.port=={port},kafka")]
    return ["tshark", "-r", str(path), "-n", *ports, "-Y", "kafka", *output]


def _fields() -> list[str]:
    return ["-T", "fields", *(part for field in FIELDS for part in ("-e", field))]


# -- memory and start-up --------------------------------------------------------------------


def memory(quick: bool) -> dict[str, Any]:
    """Peaks of a fresh session over an input, and over four times as much of it."""
    found = {}
    for source in (inputs.record_heavy(), inputs.message_heavy()):
        copies = max(1, round((32 << 20 if quick else 256 << 20) / source.path.stat().st_size))
        rows = []
        for number in (copies, 4 * copies):
            path = inputs.copies_of(source, number)
            with Helper("product", "--master", MASTER) as product:
                product(path=str(inputs.START_UP), out=_fresh("warm"))
                with MemoryWatch(product.pid) as peak:
                    run = product(path=str(path), out=_fresh("memory"))
            rows.append(
                {
                    "copies": number,
                    "byte_count": path.stat().st_size,
                    "seconds": run["seconds"],
                    **asdict(peak),
                }
            )
            if number > copies:
                path.unlink()
        found[source.name] = {"title": source.title, "rows": rows}
    return {"inputs": found}


def growth(quick: bool) -> dict[str, Any]:
    """Time of 1, 2, 4, 8 and 16 copies in one warm session."""
    rounds = 1 if quick else 3
    found = {}
    for source in (inputs.record_heavy(), inputs.message_heavy()):
        paths = {n: inputs.copies_of(source, n) for n in SIZES}
        with Helper("product", "--master", MASTER) as product:
            jobs = {str(n): partial(product, path=str(paths[n]), out=str(OUT / "g")) for n in SIZES}
            interleaved({n: jobs[n] for n in ("1", "8")}, 2)  # one task, and several
            runs = interleaved(jobs, rounds)
        rows = [
            {
                "copies": n,
                "byte_count": paths[n].stat().st_size,
                "seconds": spread([run["seconds"] for run in runs[str(n)]]),
            }
            for n in SIZES
        ]
        paths[SIZES[-1]].unlink()
        found[source.name] = {
            "title": source.title,
            "rows": rows,
            "exchange_count": runs["1"][-1]["totals"]["exchanges"],
        }
    return {"rounds": rounds, "inputs": found}


SIZES = (1, 2, 4, 8, 16)


def shapes(quick: bool) -> dict[str, Any]:
    """Time and peak memory of the same bytes in connections of other sizes, and of short ones."""
    rounds = 3 if quick else 5
    chosen = inputs.shapes(quick)
    rows: dict[str, dict[str, Any]] = {}
    with Helper("product", "--master", MASTER) as product:

        def job(shape: inputs.Shape) -> Any:
            path = inputs.shaped(shape)
            return lambda: product(path=str(path), out=_fresh("shape"))["seconds"]

        jobs = {shape.name: job(shape) for shape in chosen}
        interleaved(jobs, 1)
        seconds = interleaved(jobs, rounds)
    for shape in chosen:
        path = inputs.shaped(shape)
        with Helper("product", "--master", MASTER) as product:
            product(path=str(inputs.START_UP), out=_fresh("warm"))
            with MemoryWatch(product.pid) as peak:
                product(path=str(path), out=_fresh("memory"))
        rows[shape.name] = {
            "title": shape.title,
            "byte_count": path.stat().st_size,
            "exchange_count": shape.exchange_count,
            "seconds": spread(seconds[shape.name]),
            "python": peak.python,
            "python_anonymous": peak.python_anonymous,
        }
    return {"rounds": rounds, "rows": rows}


def startup(quick: bool) -> dict[str, Any]:
    """A capture of less than a megabyte, whole process, against jobs that do nothing."""
    rounds = 3 if quick else 7
    empty = [PYTHON, "bench/empty_job.py", "--master", "local[*]", "--settings"]
    jobs = {
        "kdissect": lambda: timed(_command(inputs.START_UP, "start")),
        "empty_spark": lambda: timed([*empty, "spark"]),
        "empty_kdissect": lambda: timed([*empty, "kdissect"]),
        "show": lambda: first_line([KDISSECT, "show", str(inputs.START_UP)]),
        "imports": lambda: timed([PYTHON, "-c", "import numpy, pyarrow"]),
    }
    interleaved(jobs, 1)
    runs = interleaved(jobs, rounds)
    return {
        "rounds": rounds,
        "file": str(inputs.START_UP.relative_to(ROOT)),
        "byte_count": inputs.START_UP.stat().st_size,
        "seconds": {name: spread(values) for name, values in runs.items()},
    }


# -- replay ---------------------------------------------------------------------------------


def replay(quick: bool) -> dict[str, Any]:
    """`kdissect replay` against a server that answers at once, in a process of its own."""
    source = inputs.message_heavy()
    part = 10 if quick else 1
    small = inputs.small_requests(300_000 // part, 100)
    paced = inputs.small_requests(20_000 if quick else 60_000, 1000, per_second=2000)
    runs = {
        "small": (f"small requests, {small.title}", small.path, "max"),
        "captured": (source.path.name, source.path, "max"),
        "paced": (f"small requests, {paced.title}", paced.path, "recorded"),
    }
    rounds = 1 if quick else 3
    jobs = {name: partial(_replayed, path, pace) for name, (_, path, pace) in runs.items()}
    done = interleaved(jobs, rounds)
    return {
        "rounds": rounds,
        **({"note": source.note} if source.note else {}),
        "rows": {
            name: {
                "title": title,
                "sent": done[name][0]["sent"],
                "ended": done[name][0]["ended"],
                "verdicts": done[name][0]["verdicts"],
                "lag_ms": done[name][0]["lag_ms"],
                **{
                    key: spread([run[key] for run in done[name]])
                    for key in ("requests_per_s", "compared_per_s")
                },
            }
            for name, (title, _, _) in runs.items()
        },
    }


def _replayed(path: Path, pace: str) -> dict[str, Any]:
    """One run. Compared: the requests by the time that the command takes beyond a dry run."""
    lines = OUT / "replay.jsonl"
    lines.unlink(missing_ok=True)
    lines.parent.mkdir(parents=True, exist_ok=True)
    with null_server(path) as port:
        command = [KDISSECT, "replay", str(path), "--to", f"127.0.0.1:{port}", "--quiet"]
        command += ["--pace", pace, "--allow", "produce,groups,transactions,admin"]
        planned_s = timed([*command, "--dry-run"])
        whole_s = timed([*command, "--fail-on", "none", "--json", str(lines)])
    summary = json.loads(lines.read_text().splitlines()[-1])
    return {
        "sent": summary["sent"],
        "ended": summary["ended"] or "",
        "verdicts": {name: count for name, count in summary["verdicts"].items() if count},
        "requests_per_s": summary["requests_per_s"],
        "compared_per_s": summary["sent"] / max(whole_s - planned_s, 1e-3),
        "lag_ms": [summary["lag"][name] / 1000 for name in LAGS if summary["lag"][name]],
    }


LAGS = ("p50_us", "p99_us", "max_us")


@contextmanager
def null_server(capture: Path) -> Iterator[int]:
    """A server in a process of its own; its port."""
    command = [PYTHON, "-m", "bench.null_server", str(capture)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


BENCHMARKS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "marginal": marginal,
    "codecs": codecs,
    "tshark": tshark,
    "growth": growth,
    "memory": memory,
    "shapes": shapes,
    "startup": startup,
    "replay": replay,
}

"""reports/benchmarks.md from the results: ratios first, then what they are made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MB = 1 << 20
GOALS = {
    ("records", "floor"): "at most 3",
    ("records", "json"): "at least 15",
    ("messages", "json"): "at least 10",
}


def text(results: dict[str, Any]) -> str:
    """The page; benchmarks that were not run are named as such."""
    parts = [HEAD, *_ratios(results)]
    for name, section in SECTIONS.items():
        if name in results:
            parts += section(results[name])
        else:
            parts += [f"## {name}\n", "Not run.\n"]
    return "\n".join(parts).rstrip() + "\n"


HEAD = """# Benchmarks

Made by `make bench`; do not edit. Ratios come first, what they are made of after them. Times are
seconds by the wall clock; a figure with brackets is a median [least-most]. *Marginal* cost of a
capture is (T of 5 copies - T of 1 copy) / 4, medians of runs that took turns; copies have hosts and
times of their own (`bench/multiply.py`).
"""


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _span(values: list[float], digits: int = 2) -> str:
    middle, low, high = (f"{value:.{digits}f}" for value in values)
    return f"{middle} [{low}-{high}]"


def _mb(size: float) -> str:
    return f"{size / MB:.1f}"


def _made_by(result: dict[str, Any]) -> str:
    machine = result["machine"]
    busy = f"; load average before it: {machine['load']} on {machine['core_count']} cores"
    note = f" {result['note']}" if "note" in result else ""
    return f"Made on {machine['date']} by `{result['command']}`{busy}.{note}\n"


# -- ratios ---------------------------------------------------------------------------------


def _ratios(results: dict[str, Any]) -> list[str]:
    machine = max((result["machine"] for result in results.values()), key=lambda m: m["date"])
    libraries = ", ".join(
        f"{name} {machine[name]}"
        for name in ("pyspark", "pyarrow", "numpy", "numba", "cramjam", "crc32c")
    )
    parts = [
        f"Machine: {machine['core_count']} cores of {machine['processor']}, "
        f"{machine['memory_gb']} GB, {machine['system']}; Python {machine['python']}, "
        f"Java {machine['java']}, {libraries}, tshark {machine['tshark']}. {machine['date']}.\n",
        "## Ratios\n",
    ]
    rows = []
    warm = results.get("marginal", {}).get("inputs", {})
    for name, one in warm.items():
        cost, title = one["product_marginal"], one["title"]
        goal = GOALS.get((name, "floor"), "")
        rows.append((f"{title}: marginal cost / floor", f"{cost / one['floor_one']:.2f}", goal))
        ratio = cost / one["floor_marginal"]
        rows.append((f"{title}: marginal cost / marginal cost of the floor", f"{ratio:.2f}", ""))
        size = one["table_bytes"] / one["floor_bytes"]
        rows.append((f"{title}: size of our files / the floor's", f"{size:.3f}", "at most 1.05"))
        other = results.get("tshark", {}).get("inputs", {}).get(name)
        if other:
            for kind in ("json", "fields"):
                ratio = other[f"{kind}_marginal"] / cost
                what = f"{title}: tshark -T {kind} / kdissect, marginal"
                rows.append((what, f"{ratio:.1f}", GOALS.get((name, kind), "")))
    rows += _codec_ratios(results.get("codecs", {}).get("rows", []))
    if "startup" in results:
        seconds = {name: spread[0] for name, spread in results["startup"]["seconds"].items()}
        for name, what in EMPTY.items():
            ratio = seconds["kdissect"] / seconds[name]
            rows.append((f"start-up / {what}", f"{ratio:.2f}", "at most 1.5"))
    for one in results.get("memory", {}).get("inputs", {}).values():
        small, large = one["rows"]
        ratio = large["python"] / small["python"]
        rows.append((f"{one['title']}: peak memory, 4x input / 1x", f"{ratio:.2f}", "about 1"))
    shapes = results.get("shapes", {}).get("rows", {})
    for name, one in shapes.items():
        what, _, shape = name.partition(", ")
        if shape == "one":
            ratio = one["seconds"][0] / shapes[f"{what}, many"]["seconds"][0]
            title = f"{what}: 90 % in one connection / spread over 100"
            rows.append((title, f"{ratio:.2f}", "at most 1.15"))
    return [*parts, _table(("ratio", "value", "goal"), rows)]


def _codec_ratios(given: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    rows = []
    new = {one["codec"]: one for one in given if one["magic"] == 2}
    for codec, one in new.items():
        what = f"records of 200-600 B, {codec}: floor / kdissect, marginal"
        cpu, wall = (one[f"floor_{name}"] / one[f"product_{name}"] for name in ("cpu", "seconds"))
        rows.append((f"{what} CPU time", f"{cpu:.0%}", "at least 60 %"))
        rows.append((f"{what} wall time", f"{wall:.0%}", "at least 60 %"))
    for one in given:
        if one["magic"] < 2:
            ratio = one["product_cpu"] / new[one["codec"]]["product_cpu"]
            what = f"magic {one['magic']} / magic 2, {one['codec']}, marginal CPU time"
            rows.append((what, f"{ratio:.2f}", "at most 3"))
    return rows


EMPTY = {
    "empty_spark": "an empty PySpark job with Spark's settings",
    "empty_kdissect": "an empty PySpark job with our settings",
}


# -- sections -------------------------------------------------------------------------------


def _marginal_section(result: dict[str, Any]) -> list[str]:
    inputs = result["inputs"].values()
    notes = [f"Note: {one['note']}.\n" for one in inputs if one["note"]]
    rows, stages, steps = [], [], []
    for one in inputs:
        seconds, totals, cost = one["seconds"], one["totals"], one["product_marginal"]
        rows.append(
            (
                f"{one['title']} ({one['file']})",
                _mb(one["byte_count"]),
                _span(seconds["product_1"]),
                _span(seconds["product_5"]),
                f"{cost:.3f}",
                _span(seconds["floor_1"], 3),
                _span(seconds["floor_5"], 3),
                f"{one['byte_count'] / MB / cost:.0f}",
                f"{totals['exchanges'] / cost / 1000:.0f}",
                f"{totals['records'] / cost / 1000:.0f}",
            )
        )
        for copies, timings in one["timings"].items():
            picked = [f"{timings.get(name, 0):.2f}" for name in STAGES]
            stages.append((f"{one['title']}, {copies}x", *picked))
        steps.append((one["title"], *(f"{value:.3f}" for value in one["floor_steps"].values())))
    sizes = [
        (
            one["title"],
            _mb(one["table_bytes"]),
            _mb(one["floor_bytes"]),
            ", ".join(f"{name} {_mb(size)}" for name, size in one["largest_tables"].items()),
        )
        for one in inputs
    ]
    return [
        "## Cost of a capture, and the floor\n",
        f"{_made_by(result)}\n`kdissect.dissect` in one warm session (`local[2,4]`) and the floor "
        f"in turns, {result['rounds']} rounds after two to warm up. The floor "
        "(`bench/floor.py`) reads the file's bytes once, checks the CRC of every record batch, "
        "decompresses the compressed ones into a reused buffer and writes the same tables from "
        "memory with pyarrow's defaults at zstd level 1, in two warm processes; it finds, decodes "
        "and builds nothing.\n",
        *notes,
        _table(
            ("capture", "MB", *COSTS, "MB/s", "1000 exchanges/s", "1000 records/s"),
            rows,
        ),
        "Stages, from `timings` in `_kdissect.json`: those of scan, assemble and decode are sums "
        "over the tasks, of which two run at a time; the others are by the wall clock.\n",
        _table(("capture", *STAGES), stages),
        "Steps of the floor on five copies, summed over its two processes:\n",
        _table(("capture", "read", "check", "decompress", "write"), steps),
        "Files of five copies, in MB:\n",
        _table(("capture", "ours", "the floor's", "our largest tables"), sizes),
    ]


COSTS = ("T of 1", "T of 5", "marginal", "floor of 1", "floor of 5")
TSHARK_COSTS = ("JSON of 1", "of 5", "marginal", "fields of 1", "of 5", "marginal")
STAGES = ("scan_s", "assemble_s", "decode_s", "stages_s", "total_s")


def _codecs_section(result: dict[str, Any]) -> list[str]:
    rows = [
        (
            f"{one['codec']}, magic {one['magic']}",
            _mb(one["byte_count"]),
            *(
                f"{one[name] * 1000:.0f}" if name in one else ""
                for who in ("product", "floor")
                for name in (f"{who}_seconds", f"{who}_cpu")
            ),
            f"{result['records'] / one['product_cpu'] / 1e6:.2f}",
            f"{one['table_bytes'] / one['floor_bytes']:.3f}" if "floor_bytes" in one else "",
        )
        for one in result["rows"]
    ]
    return [
        "## Each codec alone\n",
        f"{_made_by(result)}\nCaptures of `bench/synthesise.py`, each with "
        f"{result['records']:,} records of 200 to 600 bytes in batches of about 16 kB, produced "
        f"and fetched. Warm session and warm floor in turns as above, {result['rounds']} rounds; "
        "marginal milliseconds, by the wall clock and of the processor (user and system time of "
        "all processes, Spark's and the driver's too). The floor knows magic 2 only.\n",
        _table(
            ("codec", "MB", "kdissect ms", "CPU ms", "floor ms", "CPU ms", "M records/CPU s",
             "our files / the floor's"),
            rows,
        ),
    ]  # fmt: skip


def _process_section(result: dict[str, Any]) -> list[str]:
    rows = [
        (
            one["title"],
            _span(one["seconds"]["1"]),
            _span(one["seconds"]["5"]),
            f"{one['marginal']:.2f}",
        )
        for one in result["inputs"].values()
    ]
    return [
        "## Whole processes\n",
        f"{_made_by(result)}\n`kdissect dissect CAPTURE --out DIR --quiet` from start to end, "
        f"{result['rounds']} rounds in turns. The session's start is in both and drops out of the "
        "difference.\n",
        _table(("capture", "T of 1", "T of 5", "marginal"), rows),
    ]


def _tshark_section(result: dict[str, Any]) -> list[str]:
    if "skipped" in result:
        return ["## tshark\n", f"Skipped: {result['skipped']}.\n"]
    rows = [
        (
            one["title"],
            *(_span(one["seconds"][name], 1) for name in ("json_1", "json_5")),
            f"{one['json_marginal']:.2f}",
            *(_span(one["seconds"][name], 1) for name in ("fields_1", "fields_5")),
            f"{one['fields_marginal']:.2f}",
        )
        for one in result["inputs"].values()
    ]
    return [
        "## tshark\n",
        f"{_made_by(result)}\nWhole processes with output to /dev/null, {result['rounds']} "
        "rounds in turns: `tshark -r CAPTURE -n -d tcp.port==9092,kafka -d tcp.port==9093,kafka "
        "-Y kafka -T json`, and with `-T fields -e kafka.correlation_id -e kafka.api_key "
        "-e kafka.topic_name -e kafka.offset`. tshark uses one core; it decodes the versions that "
        "it knows, in the message-heavy capture few.\n",
        _table(
            (
                "capture",
                "JSON of 1",
                "JSON of 5",
                "marginal",
                "fields of 1",
                "fields of 5",
                "marginal",
            ),
            rows,
        ),
    ]


def _memory_section(result: dict[str, Any]) -> list[str]:
    rows = [
        (
            f"{one['title']}, {row['copies']} copies",
            _mb(row["byte_count"]),
            f"{row['seconds']:.1f}",
            _mb(row["python"]),
            _mb(row["python_anonymous"]),
            row["process_count"],
            _mb(row["java"]),
        )
        for one in result["inputs"].values()
        for row in one["rows"]
    ]
    return [
        "## Peak memory\n",
        f"{_made_by(result)}\nA fresh session (`local[2,4]`) that has dissected a small capture; "
        "then the largest sum of proportional set sizes (`Pss` of /proc/PID/smaps_rollup, every "
        "20 ms) over all Python processes, driver and workers, in MB. *Anonymous* leaves out "
        "pages of files, above all of the mapped capture, which the kernel takes back when it "
        "needs them. Goal: below 1536 MB, at four times the input too.\n",
        _table(("capture", "MB", "seconds", "Python", "of it anonymous", "processes", "JVM"), rows),
    ]


def _shapes_section(result: dict[str, Any]) -> list[str]:
    rows = [
        (
            row["title"],
            _mb(row["byte_count"]),
            row["exchange_count"],
            _span(row["seconds"]),
            _mb(row["python"]),
            _mb(row["python_anonymous"]),
        )
        for row in result["rows"].values()
    ]
    return [
        "## Shapes of connections\n",
        f"{_made_by(result)}\nOne exchange over and over (`bench/crowd.py`), {result['rounds']} "
        "rounds in turns in one warm session; then peak memory as above, of a fresh one.\n",
        _table(("capture", "MB", "exchanges", "seconds", "Python, MB", "of it anonymous"), rows),
    ]


def _startup_section(result: dict[str, Any]) -> list[str]:
    names = {"kdissect": f"`kdissect dissect {result['file']}`", **EMPTY}
    rows = [(names[name], _span(spread)) for name, spread in result["seconds"].items()]
    return [
        "## Start-up\n",
        f"{_made_by(result)}\nWhole processes, {result['rounds']} rounds in turns after one to "
        f"warm up; the capture has {result['byte_count'] / 1000:.0f} kB. The empty job "
        "(`bench/empty_job.py`) starts a session, runs one mapInArrow stage over one row and "
        "collects it.\n",
        _table(("process", "seconds"), rows),
    ]


SECTIONS = {
    "marginal": _marginal_section,
    "codecs": _codecs_section,
    "process": _process_section,
    "tshark": _tshark_section,
    "memory": _memory_section,
    "shapes": _shapes_section,
    "startup": _startup_section,
}

"""reports/benchmarks.md from the results: ratios first, then what they are made of."""

from collections.abc import Iterable
from typing import Any

MB = 1 << 20
PROGRAMS = {"fields": "tshark -T fields", "json": "tshark -T json"}
# most or least, for captures by name and what they are compared with
GOALS = {
    ("records", "json"): (">=", 40),
    ("records", "fields"): (">=", 5),
    ("codecs", "floor"): ("<=", 1.3),
    ("codecs", "json"): (">=", 40),
    ("codecs", "fields"): (">=", 5),
    ("messages", "json"): (">=", 30),
    ("messages", "fields"): (">=", 10),
}
PEAK_MAX = 1200  # MB of anonymous memory of all Python processes together
Goal = tuple[str, float] | None
Row = tuple[str, str, str, str]


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

Made by `make bench`; do not edit. Ratios come first, and their parts follow. Times are seconds by
the wall clock; a figure with brackets is a median [least-most]. *Marginal* cost of a capture is
(T of 5 copies - T of 1 copy) / 4, from medians of runs in turns. For tshark with `--quick` it
is T of 2 copies - T of 1. Copies have hosts and times of their own (`bench/multiply.py`).
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
    busy = (
        f"; load average before it: {machine['load']} on {machine['core_count']} cores of "
        f"{machine['processor']}"
    )
    note = f" {result['note']}" if "note" in result else ""
    made = f"Made on {machine['date']}, at commit {machine['commit']} or just before it"
    return f"{made}, by `{result['command']}`{busy}.{note}\n"


# -- ratios ---------------------------------------------------------------------------------


def _ratios(results: dict[str, Any]) -> list[str]:
    machine = max((result["machine"] for result in results.values()), key=lambda m: m["date"])
    libraries = ", ".join(
        f"{name} {machine[name]}"
        for name in ("pyspark", "pyarrow", "numpy", "numba", "cramjam", "crc32c")
    )
    parts = [
        f"Latest machine: {machine['core_count']} cores of {machine['processor']}, "
        f"{machine['memory_gb']} GB, {machine['system']}; Python {machine['python']}, "
        f"Java {machine['java']}, {libraries}, tshark {machine['tshark']}. {machine['date']}.\n",
        "## Ratios\n",
    ]
    rows = [
        *_input_ratios(results),
        *_codec_ratios(results.get("codecs", {}).get("rows", [])),
        *_growth_ratios(results.get("growth", {}).get("inputs", {})),
    ]
    if "startup" in results:
        seconds = {name: spread[0] for name, spread in results["startup"]["seconds"].items()}
        for name, what in EMPTY.items():
            goal = ("<=", 1.3) if name == "empty_kdissect" else None
            ratio = seconds["kdissect"] / seconds[name]
            rows.append(_row(f"start-up of dissect / {what}", ratio, goal))
        if "show" in seconds:
            least = max(0.7, 2.5 * seconds["imports"])
            imports = f"numpy and pyarrow: {seconds['imports']:.2f}"
            what = f"first line of `kdissect show`, seconds ({imports})"
            rows.append(_row(what, seconds["show"], ("<=", round(least, 2))))
    for one in results.get("memory", {}).get("inputs", {}).values():
        small, large = one["rows"]
        ratio = large["python_anonymous"] / small["python_anonymous"]
        rows.append(_row(f"{one['title']}: peak anonymous memory, 4x input / 1x", ratio))
        peak = large["python_anonymous"] / MB
        what = f"{one['title']}: peak anonymous memory of 4x, MB"
        rows.append(_row(what, peak, ("<=", PEAK_MAX), 0))
    rows += _replay_ratios(results.get("replay", {}).get("rows", {}))
    shapes = results.get("shapes", {}).get("rows", {})
    for name, one in shapes.items():
        what, _, shape = name.partition(", ")
        if shape == "one":
            ratio = one["seconds"][0] / shapes[f"{what}, many"]["seconds"][0]
            rows.append(
                _row(f"{what}: 90 % in one connection / spread over 100", ratio, ("<=", 1.15))
            )
    return [*parts, _table(("ratio", "value", "goal", "met"), rows)]


def _row(what: str, value: float, goal: Goal = None, digits: int = 2, percent: bool = False) -> Row:
    shown = f"{value:.0%}" if percent else f"{value:.{digits}f}"
    if goal is None:
        return what, shown, "", ""
    sign, limit = goal
    met = value <= limit if sign == "<=" else value >= limit
    wanted = f"{limit:.0%}" if percent else f"{limit:g}"
    return what, shown, f"{WORDS[sign]} {wanted}", "yes" if met else "no"


WORDS = {"<=": "at most", ">=": "at least"}


def _input_ratios(results: dict[str, Any]) -> list[Row]:
    rows = []
    for name, one in results.get("marginal", {}).get("inputs", {}).items():
        cost, title = one["product_marginal"], one["title"]
        goal = GOALS.get((name, "floor"))
        rows.append(_row(f"{title}: marginal cost / floor", cost / one["floor_one"], goal))
        ratio = cost / one["floor_marginal"]
        rows.append(_row(f"{title}: marginal cost / marginal cost of the floor", ratio))
        size = one["table_bytes"] / one["floor_bytes"]
        rows.append(_row(f"{title}: size of our files / the floor's", size, ("<=", 1.05), 3))
        for kind, program in PROGRAMS.items():
            other = results.get("tshark", {}).get("inputs", {}).get(name, {})
            if f"{kind}_marginal" in other:
                ratio = other[f"{kind}_marginal"] / cost
                goal = GOALS.get((name, kind))
                rows.append(_row(f"{title}: {program} / kdissect, marginal", ratio, goal, 1))
    return rows


def _replay_ratios(rows: dict[str, Any]) -> list[Row]:
    """Goals of replay."""
    if not rows:
        return []
    what = "replay at --pace max, small requests a second, {}"
    return [
        _row(what.format("compared"), rows["small"]["compared_per_s"][0], (">=", 5_000), 0),
        _row("replay at --pace max, perf_small.pcap, requests a second, compared",
             rows["captured"]["compared_per_s"][0], (">=", 1_500), 0),
        _row("replay of 1000 connections: lag behind the schedule, p99, ms",
             rows["paced"]["lag_ms"][1], ("<=", 10), 1),
    ]  # fmt: skip


def _growth_ratios(inputs: dict[str, Any]) -> list[Row]:
    rows = []
    for one in inputs.values():
        title = one["title"]
        by_copies = {row["copies"]: row for row in one["rows"]}
        first, middle, last = (by_copies[n] for n in (1, 4, 16))
        seconds = [row["seconds"][0] for row in (first, middle, last)]
        marginal = (seconds[1] - seconds[0]) / 3
        ratio = (seconds[2] - seconds[0]) / marginal + 1
        rows.append(_row(f"{title}: 16x input / marginal time", ratio, ("<=", 17), 1))
    return rows


def _codec_ratios(given: list[dict[str, Any]]) -> list[Row]:
    rows = []
    new = {one["codec"]: one for one in given if one["magic"] == 2}
    for codec, one in new.items():
        what = f"records of 200-600 B, {codec}: floor / kdissect, marginal"
        for kind, name in (("CPU", "cpu"), ("wall", "seconds")):
            share = one[f"floor_{name}"] / one[f"product_{name}"]
            rows.append(_row(f"{what} {kind} time", share, (">=", 0.6), percent=True))
    for one in given:
        if one["magic"] < 2:
            ratio = one["product_cpu"] / new[one["codec"]]["product_cpu"]
            what = f"magic {one['magic']} / magic 2, {one['codec']}, marginal CPU time"
            rows.append(_row(what, ratio, ("<=", 3)))
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
        "(`bench/floor.py`) reads the file's bytes once and checks the CRC of every record batch. "
        "It decompresses the compressed ones into a reused buffer, and writes the same tables from "
        "memory with pyarrow's defaults at zstd level 1, in two warm processes. It finds, decodes "
        "and builds nothing.\n",
        *notes,
        _table(("capture", "MB", *COSTS, "MB/s", "1000 exchanges/s", "1000 records/s"), rows),
        "Stages, from `timings` in `_kdissect.json`: those of scan, assemble and decode are sums "
        "over the tasks, of which two run at a time; the others are by the wall clock.\n",
        _table(("capture", *STAGES), stages),
        *_stage_rates(result),
        "Steps of the floor on five copies, summed over its two processes:\n",
        _table(("capture", "read", "check", "decompress", "write"), steps),
        "Files of five copies, in MB:\n",
        _table(("capture", "ours", "the floor's", "our largest tables"), sizes),
    ]


def _stage_rates(result: dict[str, Any]) -> list[str]:
    stages = ("scan", "assemble", "decode")
    rows = []
    for one in result["inputs"].values():
        timings = list(one["timings"].values())[-1]
        rates = [
            f"{size / MB / timings[f'{stage}_s']:.0f}"
            if (size := timings.get(f"{stage}_bytes")) and timings.get(f"{stage}_s")
            else ""
            for stage in stages
        ]
        if any(rates):
            rows.append((one["title"], *rates))
    what = "MB/s of a stage: the bytes that its tasks read, by the sum of their times (one core)."
    return [f"{what}\n", _table(("capture", *stages), rows)] if rows else []


COSTS = ("T of 1", "T of 5", "marginal", "floor of 1", "floor of 5")
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
            rows
        ),
    ]  # fmt: skip


def _tshark_section(result: dict[str, Any]) -> list[str]:
    if "skipped" in result:
        return ["## tshark\n", f"Skipped: {result['skipped']}.\n"]
    inputs = result["inputs"].values()
    kinds = {"json": "JSON", "fields": "fields"}
    copies = max(one["copies"] for one in inputs)
    head = [
        cell for kind in kinds.values() for cell in (f"{kind} of 1", f"of {copies}", "marginal")
    ]
    rows = [
        (
            one["title"],
            *(
                cell
                for kind in kinds
                for cell in (
                    _span(one["seconds"][f"{kind}_1"], 1),
                    _span(one["seconds"][f"{kind}_{one['copies']}"], 1),
                    f"{one[f'{kind}_marginal']:.2f}",
                )
            ),
        )
        for one in inputs
    ]
    return [
        "## tshark\n",
        f"{_made_by(result)}\nWhole processes with output to /dev/null, {result['rounds']} "
        "rounds in turns: `tshark -r CAPTURE -n -d tcp.port==9092,kafka -d tcp.port==9093,kafka "
        "-Y kafka -T json`, and with `-T fields -e kafka.correlation_id "
        "-e kafka.api_key -e kafka.topic_name -e kafka.offset`. tshark uses one core; it decodes "
        "the versions that it knows, in the message-heavy capture few.\n",
        _table(("capture", *head), rows),
    ]


def _growth_section(result: dict[str, Any]) -> list[str]:
    rows = [
        (
            f"{one['title']}, {row['copies']}x",
            _mb(row["byte_count"]),
            row["copies"] * one["exchange_count"],
            _span(row["seconds"]),
        )
        for one in result["inputs"].values()
        for row in one["rows"]
    ]
    return [
        "## Growth\n",
        f"{_made_by(result)}\nCopies in one warm session (`local[2,4]`), {result['rounds']} "
        "rounds in turns.\n",
        _table(("capture", "MB", "exchanges", "seconds"), rows),
    ]


def _memory_section(result: dict[str, Any]) -> list[str]:
    rows = [
        (
            f"{one['title']}, {row['copies']} copies",
            _mb(row["byte_count"]),
            f"{row['seconds']:.1f}",
            *(
                _mb(row[name]) if name in row else ""
                for name in ("python", "python_anonymous", "driver", "workers", "java")
            ),
            row["process_count"],
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
        f"needs them. Goal: at most {PEAK_MAX} MB anonymous, at four times the input too.\n",
        _table(
            (
                "capture",
                "MB",
                "seconds",
                "Python",
                "of it anonymous",
                "driver",
                "workers",
                "JVM",
                "Python processes",
            ),
            rows,
        ),
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
        f"{_made_by(result)}\nOne exchange over and over (`bench/synthesise.py`), "
        f"{result['rounds']} rounds in turns in one warm session; then peak memory as above, of a "
        "fresh one.\n",
        _table(("capture", "MB", "exchanges", "seconds", "Python, MB", "of it anonymous"), rows),
    ]


def _startup_section(result: dict[str, Any]) -> list[str]:
    names = {
        "kdissect": f"`kdissect dissect {result['file']}`",
        **EMPTY,
        "show": f"`kdissect show {result['file']}`, until its first line",
        "imports": "`python -c 'import numpy, pyarrow'`",
    }
    rows = [(names[name], _span(spread)) for name, spread in result["seconds"].items()]
    return [
        "## Start-up\n",
        f"{_made_by(result)}\nWhole processes, {result['rounds']} rounds in turns after one to "
        f"warm up; the capture has {result['byte_count'] / 1000:.0f} kB. The empty job "
        "(`bench/empty_job.py`) starts a session, runs one mapInArrow stage over one row and "
        "collects it.\n",
        _table(("process", "seconds"), rows),
    ]


def _replay_section(result: dict[str, Any]) -> list[str]:
    rows = result["rows"].values()
    made = [
        (
            one["title"],
            one["sent"],
            _span(one["requests_per_s"], 0),
            _span(one["compared_per_s"], 0),
            " / ".join(f"{ms:.1f}" for ms in one["lag_ms"]),
            ", ".join(f"{count} {verdict}" for verdict, count in one["verdicts"].items()),
        )
        for one in rows
    ]
    ended = [f"{one['title']}: {one['ended']}\n" for one in rows if one["ended"]]
    return [
        "## Replay\n",
        f"{_made_by(result)}\n`kdissect replay` against a server in a process of its own that "
        "answers at once, with the captured responses (`bench/null_server.py`), "
        f"{result['rounds']} rounds in turns. Small requests are OffsetFetch of 40 bytes, each "
        "sent when the one before it on its connection was answered. The server keeps no records, "
        "so what it holds after the run is not what it has answered. *A second*: while sending. "
        "*Compared*: by the time that the whole command takes beyond a dry run. Lag is p50 / p99 / "
        "max behind the schedule, at recorded pace.\n",
        _table(("requests", "sent", "a second", "compared", "lag, ms", "verdicts"), made),
        *ended,
    ]


SECTIONS = {
    "marginal": _marginal_section,
    "codecs": _codecs_section,
    "tshark": _tshark_section,
    "growth": _growth_section,
    "memory": _memory_section,
    "shapes": _shapes_section,
    "startup": _startup_section,
    "replay": _replay_section,
}

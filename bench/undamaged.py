"""Measures the cost of hardening on harmless captures: this commit beside an older one.

Each commit is checked out into a worktree of its own under a temporary folder and runs there in a
warm Spark session (`product.py`, which both have), in turns. Everything else that was built
meanwhile is in the difference too, so a ratio above 1 says where to look, not whose fault it is.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench import inputs
from bench.measure import ROOT, Helper, cpu_seconds, interleaved, median, spread

# The first thing that was built for hostile captures; before it they were read as they came.
FIRST_OF_HOSTILE = "tests/fuzz/check.py"
MASTER = "local[2,4]"
COPIES = 5


def git(*arguments: str) -> str:
    """Return git's output in this checkout. Raises RuntimeError with its message if it fails."""
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def before_hostile() -> str:
    """The commit before the one that brought FIRST_OF_HOSTILE."""
    added = git("log", "--diff-filter=A", "--format=%H", "--reverse", "--", FIRST_OF_HOSTILE)
    if not added:
        raise RuntimeError(f"no commit of this history brought {FIRST_OF_HOSTILE}")
    return git("rev-parse", added.splitlines()[0] + "^")


@contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """A checkout of `commit` at `folder`, gone afterwards."""
    git("worktree", "add", "--quiet", "--detach", str(folder), commit)
    try:
        yield folder
    finally:
        git("worktree", "remove", "--force", str(folder))


def undamaged(quick: bool, against: str | None = None) -> dict[str, Any]:
    """Wall and processor time of this commit and of `against` on captures without any damage."""
    rounds = 3 if quick else 9
    commits = {
        "before": git("rev-parse", against or before_hostile()),
        "now": git("rev-parse", "HEAD"),
    }
    sources = (inputs.record_heavy(), inputs.message_heavy(), inputs.five_codecs())
    paths = {source.name: [str(inputs.copies_of(source, n)) for n in (1, COPIES)]
             for source in sources}  # fmt: skip
    found = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kdissect-")))
        helpers = {}
        for name, commit in commits.items():
            place = stack.enter_context(worktree(commit, folder / name))
            helpers[name] = stack.enter_context(Helper("product", "--master", MASTER, root=place))
        for source in sources:
            jobs = {
                f"{name}_{copies}": _job(helper, path, str(folder / f"{name}.tables"))
                for copies, path in zip((1, COPIES), paths[source.name], strict=True)
                for name, helper in helpers.items()
            }
            interleaved(jobs, 2)  # compiled, loaded, in the page cache
            found[source.name] = _compared(source, interleaved(jobs, rounds))
    return {
        "rounds": rounds,
        "commits": {
            name: {"id": commit[:12], "title": git("log", "-1", "--format=%s", commit)}
            for name, commit in commits.items()
        },
        "uncommitted": bool(git("status", "--porcelain", "--untracked-files=no")),
        "inputs": found,
    }


def _job(helper: Helper, path: str, out: str) -> Callable[[], dict[str, Any]]:
    """Runs it, and adds the processor time of the helper's processes."""

    def job() -> dict[str, Any]:
        began = cpu_seconds(helper.pid)
        answer: dict[str, Any] = helper(path=path, out=out)
        return answer | {"cpu": cpu_seconds(helper.pid) - began}

    return job


def _compared(source: inputs.Input, runs: dict[str, list[Any]]) -> dict[str, Any]:
    """Spreads of each job, and how the medians of this commit are to those of the other."""
    times = {
        what: {name: [run[what] for run in done] for name, done in runs.items()}
        for what in ("seconds", "cpu")
    }
    rounds = range(len(runs["now_1"]))
    ratios = {
        what: spread([each[f"now_{COPIES}"][turn] / each[f"before_{COPIES}"][turn]
                      for turn in rounds])
        for what, each in times.items()
    }  # fmt: skip
    marginal = {
        what: {
            name: (median(each[f"{name}_{COPIES}"]) - median(each[f"{name}_1"])) / (COPIES - 1)
            for name in ("before", "now")
        }
        for what, each in times.items()
    }
    return {
        "title": source.title,
        "file": source.path.name,
        "note": source.note,
        "byte_count": source.path.stat().st_size,
        **{what: {name: spread(values) for name, values in each.items()}
           for what, each in times.items()},
        "ratios": ratios,
        "marginal": marginal,
    }  # fmt: skip

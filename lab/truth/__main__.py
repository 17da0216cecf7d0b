"""Write ``reports/truth.md``: each kind of answer, on captures whose truth is known.

    python -m lab.truth [SECTION ...] [--captures PATH] [--out FILE]

Each section is a module of this package, with a `Section` or a function that returns Markdown from
its heading on. Named sections are made anew; those that are not named stay as they are in the file.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from lab.truth import (
    diff,
    finding,
    lag,
    latency,
    lost_answers,
    readiness,
    rebalance,
    transaction,
    wait,
)

ROOT = Path(__file__).resolve().parents[2]
CAPTURES = ROOT.parent / "shared" / "captures"
OUT = ROOT / "reports" / "truth.md"
SECTIONS: dict[str, Callable[[Path], str]] = {
    "latency": latency.section,
    "wait": wait.SECTION.page,
    "lag": lag.SECTION.page,
    "rebalance": rebalance.SECTION.page,
    "transaction": transaction.SECTION.page,
    "readiness": readiness.SECTION.page,
    "loss": lost_answers.SECTION.page,
    "finding": finding.section,
    "diff": diff.section,
}
HEAD = """# Answers and truths

What kdissect concludes, on captures whose truth is known from the brokers' and clients' own logs.
`python -m lab.truth` writes this page; the captures are not part of the repository.
"""


def sections_of(text: str) -> dict[str, str]:
    """The sections of a page by name, from their `<!-- name -->` on."""
    parts = re.split(r"^<!-- (\w+) -->\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("section", nargs="*", choices=[*SECTIONS, []])
    parser.add_argument("--captures", type=Path, default=CAPTURES)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    made = sections_of(given.out.read_text()) if given.out.is_file() else {}
    for name in given.section or SECTIONS:
        made[name] = SECTIONS[name](given.captures)
    parts = [f"<!-- {name} -->\n{made[name].strip()}\n" for name in SECTIONS if name in made]
    given.out.write_text("\n".join([HEAD, *parts]))


if __name__ == "__main__":
    main()

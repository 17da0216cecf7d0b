"""Gate: captures replayed to a fresh broker of their own release differ in nothing."""

import argparse

from lab.replay.captures import RECORDED
from lab.replay.runs import VERDICTS, busy, cells, found_at_the_end, run_recorded, show

HEAD = ("capture", "nodes", "pace", "exit", *VERDICTS, "at end", "seconds")
WIDTHS = (20, 5, 8, 4, 6, 9, 9, 5, 7, 6, 7)
THREE_NODES = ("cluster", "sarama", "transactions")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="CAPTURE", help="without: all")
    parser.add_argument("--pace", action="append", choices=("recorded", "max"))
    parser.add_argument("--nodes", type=int, choices=(1, 3), help="of the target; without: both")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--busy", type=int, default=0, help="processes that burn CPU beside it")
    parser.add_argument("--show", action="store_true", help="the findings of each run")


def main(given: argparse.Namespace) -> int:
    """Return the count of runs with a difference."""
    print(cells(HEAD, WIDTHS), flush=True)
    failed = 0
    for recorded in RECORDED:
        if (given.names and recorded.name not in given.names) or not recorded.path.exists():
            continue
        for node_count in (1, 3):
            if given.nodes not in (None, node_count):
                continue
            if node_count == 3 and recorded.name not in (given.names or THREE_NODES):
                continue
            for pace in given.pace or ("max",):
                for _ in range(given.times):
                    with busy(given.busy):
                        run = run_recorded(
                            recorded, recorded.kafka_version, "--pace", pace, node_count=node_count
                        )
                    is_bad = bool(run.status or found_at_the_end(run))
                    failed += is_bad
                    lines = 8 if is_bad or given.show else 0
                    show((recorded.name, node_count, pace), run, WIDTHS, lines)
    print(f"{failed} runs with a difference")
    return failed

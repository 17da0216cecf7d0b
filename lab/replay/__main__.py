"""``python -m lab.replay GATE``: see lab/README.md."""

import argparse
import sys

from lab.replay import faults, honest, lies, record, upgrade

GATES = {"honest": honest, "record": record, "upgrade": upgrade, "faults": faults, "lies": lies}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.replay")
    commands = parser.add_subparsers(required=True)
    for name, gate in GATES.items():
        command = commands.add_parser(name, help=gate.__doc__)
        gate.add_options(command)
        command.set_defaults(main=gate.main)
    given = parser.parse_args()
    return min(given.main(given), 1)


if __name__ == "__main__":
    sys.exit(main())

"""Entry point of ``python -m kdissect`` and of the command `kdissect`, before modules are
loaded."""

import sys


def main() -> None:
    """Run the command line; SIGINT while modules are loaded exits with 130, as it does later."""
    try:
        from kdissect.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("kdissect: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()

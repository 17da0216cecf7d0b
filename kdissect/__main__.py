"""``python -m kdissect`` and the command `kdissect`: what runs until the command line is loaded."""

import sys


def main() -> None:
    """Entry point; SIGINT while modules are loaded ends as any other does."""
    try:
        from kdissect.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("kdissect: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()

"""``python -m kdissect`` is the command line."""

from kdissect.cli import main

main()

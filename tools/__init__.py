"""Programs for maintainers: `python -m tools.NAME` in the checkout. Not part of the package."""

"""Answers of kdissect beside known truths: a module makes a section of `reports/truth.md`."""

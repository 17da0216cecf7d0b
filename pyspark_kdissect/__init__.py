"""Spark looks for data sources in modules called pyspark_*, and finds kdissect's here."""

from kdissect.datasource import KdissectDataSource as DefaultSource

__all__ = ["DefaultSource"]

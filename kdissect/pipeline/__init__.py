"""The steps composed, in process and on Spark."""

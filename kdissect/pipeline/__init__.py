"""The steps of a run, scan to analyse, in this process and on Spark."""

"""A user's own Spark job: dissects captures in the session that it was given.

spark-submit job.py OUT CAPTURE...
"""

import sys

from pyspark.sql import SparkSession

import kdissect

if __name__ == "__main__":
    session = SparkSession.builder.appName("a job with captures").getOrCreate()
    tables = kdissect.dissect(session, sys.argv[2:], sys.argv[1], split_bytes=400_000)
    print(f"exchanges: {tables.exchanges.num_rows}")
    session.stop()

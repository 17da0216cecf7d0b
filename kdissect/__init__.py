"""kdissect: packet captures of Apache Kafka traffic to tables."""

__version__ = "0.1.0"

"""Kafka messages and record batches: bytes to values and Arrow columns, and back."""

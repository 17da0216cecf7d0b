"""Byte ranges of connections to Kafka frames, and frames to exchanges."""

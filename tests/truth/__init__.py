"""Acceptance tests: whole captures against the logs of brokers and clients."""

"""Kafka's protocol: definitions of messages, column plans, API keys, error codes, releases."""

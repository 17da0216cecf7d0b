"""Replay of a captured workload against a live broker. `model` has the words."""

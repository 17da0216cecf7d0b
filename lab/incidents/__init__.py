"""Incidents recorded with real brokers and clients; a measure of what kdissect finds."""

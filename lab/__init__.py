"""The laboratory: recorders, and experiments with real brokers. Nothing imports it."""

"""The run: steps are sent, retried and completed."""

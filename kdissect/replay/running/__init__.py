"""The run: steps are sent, sent again while the target is not ready, and completed."""

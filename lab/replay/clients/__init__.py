"""Programs of clients that are recorded."""

"""Files to packets to TCP segments."""

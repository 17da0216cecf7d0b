"""Capture files to packets, and packets to TCP segments."""

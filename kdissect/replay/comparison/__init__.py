"""Responses of the target compared with captured ones, with rules for what may differ."""

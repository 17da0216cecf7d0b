"""Segments to streams, frames and exchanges."""

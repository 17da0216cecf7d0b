"""Connections that stay open over a cut between captures or windows."""

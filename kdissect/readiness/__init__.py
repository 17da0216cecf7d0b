"""Finds clients that would break on another Kafka release."""

from kdissect.readiness.assessment import assess

__all__ = ["assess"]

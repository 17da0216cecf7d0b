"""Which clients would break on another Kafka release."""

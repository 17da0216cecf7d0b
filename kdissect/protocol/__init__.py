"""What Kafka says: definitions, plans, error codes."""

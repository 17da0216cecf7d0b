"""The acceptance tests: whole captures against what brokers and clients themselves wrote down."""

"""Arrow schemas and the rows of every table."""

"""Arrow schemas of all tables, and functions that build their rows."""

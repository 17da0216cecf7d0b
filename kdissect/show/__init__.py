"""`kdissect show`: the exchanges of a capture on the terminal, as they come (no Spark)."""

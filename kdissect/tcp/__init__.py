"""TCP segments to ordered byte ranges and gaps, for each connection."""

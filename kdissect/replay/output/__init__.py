"""Results of a replay: console, HTML, JSON lines, JUnit and tables."""

"""The target cluster: connections, authentication, nodes, topics, and the guard."""

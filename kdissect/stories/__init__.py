"""Groups, transactions, producers and fetch sessions: turns events, ordered by key, into rows."""

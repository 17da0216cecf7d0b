"""Groups, transactions and producers: events by key to rows."""

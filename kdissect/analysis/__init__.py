"""What messages tell only together: groups, transactions, producers' sequences."""

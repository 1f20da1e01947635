"""Which keys a query sees beyond a band: rules, and lists of blocks made from them or from data."""

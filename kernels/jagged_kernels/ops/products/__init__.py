"""Matrix products with a user's tokens."""

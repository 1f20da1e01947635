"""A user's tokens into one: sums, means, maxima, weighted sums."""

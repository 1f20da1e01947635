"""The containers: a batch of sequences, a batch of square matrices, and what they convert to."""

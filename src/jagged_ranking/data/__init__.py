"""Click logs as batches of jagged tensors."""

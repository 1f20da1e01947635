"""Attention of numbers in FP8, for serving: `numbers` is what they are, `api` the functions."""

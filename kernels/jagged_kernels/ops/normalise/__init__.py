"""Softmax and layer normalisation."""

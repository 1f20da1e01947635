"""Sums, products and differences, element by element."""

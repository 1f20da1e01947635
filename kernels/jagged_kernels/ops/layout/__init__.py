"""Tokens into another layout: concatenated, cut, selected, padded."""

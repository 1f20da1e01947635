"""Attention on any GPU, a program a tile of queries."""

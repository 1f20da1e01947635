"""Attention with Hopper's own machinery, in Gluon: imported only where it runs."""

"""Triton functions that kernels of several rooms share, and the host code that goes with them."""

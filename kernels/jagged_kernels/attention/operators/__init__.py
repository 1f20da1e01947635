"""The ways to compute attention as PyTorch operators, each with its gradient."""

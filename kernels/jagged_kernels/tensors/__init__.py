"""Jagged tensors between libraries: `nested` (PyTorch), `torchrec`, `columns` (Arrow, datasets)."""

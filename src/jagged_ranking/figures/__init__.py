"""Figures and tables, drawn from results and manifests alone: no GPU, no network."""

"""Predictions of a trained model, metrics, and the floor that a model must beat."""

"""Training one model, and comparing several."""

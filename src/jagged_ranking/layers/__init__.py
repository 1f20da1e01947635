"""What all models share: embeddings before the history is pooled, the head behind it."""

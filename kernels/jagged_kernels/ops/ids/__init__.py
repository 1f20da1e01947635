"""Item ids: embeddings, distinct ids, the highest scores."""

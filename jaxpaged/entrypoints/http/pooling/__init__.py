"""Endpoints for models that pool: embeddings, classes, scores, and documents in order of relevance."""

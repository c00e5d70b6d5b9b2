"""Towers: what makes embeddings of pictures, by family. `interface.py` says what a tower gives to the rest."""

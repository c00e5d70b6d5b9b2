"""Grammars of structured outputs: how they are written, compiled and matched."""

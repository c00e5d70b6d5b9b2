"""Shapes that answers are bound to: how they are written, compiled and matched."""

"""Devices that work together."""

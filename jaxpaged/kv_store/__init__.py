"""Keys and values outside of the device: what a page of them is, and the tiers of stores that keep pages.

Everything here handles bytes. It knows neither requests nor schedulers, nor jax. README.md beside it has more.
"""

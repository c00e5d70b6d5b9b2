"""Which keys and values travel between the device and the tiers of pages: what is saved, what is loaded, and when."""

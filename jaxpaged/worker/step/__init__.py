"""One step on the device: its input, its functions, and what comes back."""

"""Keys and values between the devices and the tiers of pages: the copies, and the threads that move bytes."""

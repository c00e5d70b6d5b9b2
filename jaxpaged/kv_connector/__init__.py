"""What carries keys and values between the KV cache and anything besides the device. `base.py` is the seam."""

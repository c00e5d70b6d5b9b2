"""What files store in place of 16-bit weights, decoded by numpy: knows neither specs, config, nor devices."""

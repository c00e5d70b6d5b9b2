"""Model architectures: what config.json means, which parameters exist, and the forward pass."""

"""What compiled programs do on a device that need not be here, read from what its compiler says."""

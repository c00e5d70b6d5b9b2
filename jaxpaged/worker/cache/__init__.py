"""What layers cache, on the devices: a file for each kind of cache, and the table of them (`kinds.py`)."""

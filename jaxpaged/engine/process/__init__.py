"""The engine core in a process of its own: starting it, talking to it, and noticing when it no longer answers."""

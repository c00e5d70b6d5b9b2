"""What the engine tells of itself: metrics, logs, traces, records of steps, KV events."""

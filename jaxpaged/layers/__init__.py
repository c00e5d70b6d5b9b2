"""Pure functions that models are built from. They know no checkpoint and no request."""

"""How a step gets from the engine core to the worker or workers that compute it."""

"""How weights lie in checkpoints that were quantised, as their config.json says: one module for each family.

`reading.py` picks the family. Each makes a `Quantization` (`scheme.py`) of what it reads: which modules are stored by
which scheme, a scheme being the tensors that there are in place of a weight, in what shapes, and what decodes them.
What the numbers in them mean is known to `params/formats`.
"""

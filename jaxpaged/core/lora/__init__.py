"""Which adapters there are, which of them are in host memory and in slots of the devices, and who may be in a step."""

"""Building blocks of models: parameters and the ops that use them, bound once for a device and a type."""

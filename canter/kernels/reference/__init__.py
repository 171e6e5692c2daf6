"""The meaning of every op, in torch: slow, plain, on any device and in any floating type."""

"""Logits processors that an operator loads: the interface, how one is found by name, and those that Canter brings."""

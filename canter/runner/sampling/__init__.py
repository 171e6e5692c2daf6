"""From logits to tokens: processors, truncation, the draw, and log-probabilities."""

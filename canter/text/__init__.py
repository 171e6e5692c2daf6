"""Text on one side, token ids on the other: tokenizers, detokenizing streams, stop strings and chat templates. Never imports torch."""

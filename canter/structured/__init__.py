"""Output that obeys a grammar: from what a request asks for to the tokens that may come next."""

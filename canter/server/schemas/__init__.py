"""Request and response bodies, a file for each API dialect."""

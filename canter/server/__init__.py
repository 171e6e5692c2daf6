"""The HTTP server: one generation pipeline, and for each API dialect a schema, routes and an encoder. No torch."""

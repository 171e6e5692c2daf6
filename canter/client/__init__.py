"""What stands between a frontend and an engine: one object per request, and clients for an engine near or far. No torch."""

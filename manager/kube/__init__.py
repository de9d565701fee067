"""What the daemon asks and tells the API server."""

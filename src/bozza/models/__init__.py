"""Finding, loading, checking and running models."""

"""The server half of every method, on one round protocol (`strategies.base`)."""

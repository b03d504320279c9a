"""The centralised upper bound at a site: ordinary training; one simulated site holds all training samples."""

from client_app.fedavg import train

__all__ = ["train"]

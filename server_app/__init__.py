"""The front door: run config to settings to strategy to rounds; run folder, checkpoints, report."""

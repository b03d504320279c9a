"""The ServerApp: Flower's run config in, one finished run out."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Checks the run config as a whole before any work, then runs. An error ends the run as failed."""
    from federation.settings import Settings
    from server_app.runner import run

    run(Settings.from_run_config(context.run_config), grid)

"""Trains a federation in this process, on your own folder of images.

    python examples/train_in_process.py path/to/folder --rounds 5

The folder has a manifest.csv (README, "Your own data"); its column `site` says which hospital holds a row. Nothing is
started but this process, so a debugger reaches the server's code and the sites' alike.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from server_app import inprocess


def main() -> None:
    """Trains, and prints the result of every hospital."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, help="folder or zip with manifest.csv and images")
    options.add_argument("--method", default="fedavg")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--image-size", type=int, default=64)
    options.add_argument("--runs-dir", type=Path, default=Path("runs"))
    chosen = options.parse_args()

    outcome = inprocess.run(
        {
            "method": chosen.method,
            "data.root": str(chosen.folder.resolve()),
            "data.partition": "by_site",
            "data.image_size": chosen.image_size,
            "federation.rounds": chosen.rounds,
            "reporting.runs_dir": str(chosen.runs_dir),
        }
    )
    print(f"model {outcome.model_sha256[:12]}, test AUROC {outcome.metrics['macro_auroc']}")
    print(f"report: {outcome.run_dir / 'report.html'}")


if __name__ == "__main__":
    main()

"""Removes what a machine of the federation keeps for convenience only: code of old runs, and decoded patient images.

    python -m deploy.clean KITDIR [--keep-days 7] [--dry-run]

Flower keeps the code of every version it ever ran, and a site keeps decoded images so that the next message need not
decode them again. Both come back by themselves when they are needed. Ledgers, logs, local models and run folders are
never touched. What a running message has open stays readable for it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.kit import Kit, KitError, read_kit

DAY_S = 86_400.0
CODE, IMAGES = Path("flower") / "apps", Path("cache")


def stale(kit: Kit, keep_days: float, now: float) -> list[Path]:
    """Old code but for the newest, and decoded images that nobody has read or written for so many days; sorted.

    With 0 days everything of both, as for a hospital that leaves.
    """
    code = sorted(_entries(kit.state_dir / CODE), key=last_used)
    images = [path for path in _entries(kit.state_dir / IMAGES) if not path.name.endswith(".lock")]
    if keep_days <= 0:
        return sorted((*code, *images))
    return sorted(path for path in (*code[:-1], *images) if last_used(path) < now - keep_days * DAY_S)


def last_used(path: Path) -> float:
    """When a file, or any file in a folder, was last read or written. Folders do not count: looking is reading."""
    files = [part.lstat() for part in path.rglob("*") if not part.is_dir()] if path.is_dir() else [path.lstat()]
    return max((max(part.st_atime, part.st_mtime) for part in files), default=path.lstat().st_mtime)


def size_bytes(path: Path) -> int:
    """Bytes of a file or of everything in a folder; links count themselves."""
    return sum(part.lstat().st_size for part in ([path, *path.rglob("*")] if path.is_dir() else [path]))


def remove(paths: Sequence[Path]) -> int:
    """Removes files and folders; returns the bytes that this frees."""
    freed = 0
    for path in paths:
        freed += size_bytes(path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return freed


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m deploy.clean", description=__doc__.split("\n")[0])
    parser.add_argument("kit", type=Path, help="folder of this machine's kit")
    parser.add_argument(
        "--keep-days", type=float, default=7.0, help="what was used since then stays (default: 7); 0: nothing does"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would go, remove nothing")
    options = parser.parse_args(arguments)
    try:
        kit = read_kit(options.kit)
        paths = stale(kit, options.keep_days, time.time())
        freed = sum(map(size_bytes, paths)) if options.dry_run else remove(paths)
    except (KitError, OSError) as error:
        print(f"clean: {error}", file=sys.stderr)
        return 1
    word = "would free" if options.dry_run else "freed"
    print("".join(f"{path}\n" for path in paths) + f"clean: {word} {freed / 1e6:.1f} MB in {len(paths)} places")
    return 0


if __name__ == "__main__":
    sys.exit(main())

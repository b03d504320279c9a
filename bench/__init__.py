"""Side-by-side measurements: every file measures ours and a peer in one run. `python -m bench` runs them all.

A benchmark file has ``measure() -> list[Row]``. Nothing here fails on a number; it reports.
"""

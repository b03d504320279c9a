"""The egress gate: the one door out of a site.

A reply leaves only if it is exactly what the method's payload declares. Every reply that leaves becomes one line of
the site's ``egress.jsonl``: what, how much, why, and the SHA-256 of its content, chained by hash to the line before.

    python -m client_app.egress verify path/to/egress.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, RecordDict

from federation import wire
from federation.limits import Limits
from federation.wire import Payload

NO_LIMITS = Limits()
GENESIS = "0" * 64
HEAD_BYTES = 128


class EgressError(RuntimeError):
    """A reply that holds something undeclared or not finite. It does not leave the site."""


def release(
    content: RecordDict,
    payload: Payload,
    ledger: Ledger,
    *,
    server_round: int,
    action: str,
    limits: Limits = NO_LIMITS,
) -> RecordDict:
    """Checks a reply against its declaration, writes its line in the ledger, and returns it unchanged.

    The line is on disk before the reply leaves. Raises EgressError naming what is wrong, in the site's log only, and
    UploadTooLarge where the site's ``limits`` do not let it out.
    """
    if wrong := payload.violation(content):
        raise EgressError(f"the reply to {action} may not leave: {wrong}")
    for record, arrays in wire.array_records(content).items():
        for name, value in wire.tensors(wire.decode(arrays), copy=False).items():
            if value.is_floating_point() and not math.isfinite(float(torch.linalg.vector_norm(value.double()))):
                raise EgressError(f"the reply to {action} may not leave: {record}/{name} is not finite")
    size_bytes = wire.size_bytes(content)
    if limits.max_upload_bytes:
        limits.check_upload(ledger.sent_bytes(server_round), size_bytes, server_round)
    ledger.append(
        {
            "round": server_round,
            "action": action,
            "purpose": payload.purpose,
            "records": {name: _described(content, name) for name in sorted(content)},
            "bytes": size_bytes,
            "payload_sha256": wire.content_sha256(content),
        }
    )
    return content


def _described(content: RecordDict, name: str) -> dict[str, Any]:
    return {
        key: f"{value.dtype}{list(value.shape)}" if isinstance(value, Array) else type(value).__name__
        for key, value in sorted(content[name].items())
    }


class Ledger:
    """A site's append-only list of everything that left it.

    Every line holds the hash of the line before and its own; ``egress.head`` beside it holds the number of lines and
    the last hash, so that cutting lines off the end shows too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head = path.with_suffix(".head")

    def append(self, entry: dict[str, Any]) -> None:
        """Writes one line and flushes it to the disk. Raises EgressError where the end of the ledger is damaged."""
        number, previous = self._end()
        body = {
            "line": number + 1,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            **entry,
            "previous": previous,
        }
        body["sha256"] = _line_sha256(body)
        with open(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as file:
            file.write(json.dumps(body, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._write_head(json.dumps({"entries": body["line"], "sha256": body["sha256"]}))

    def sent_bytes(self, server_round: int) -> int:
        """Bytes of tensors that left in a round, repetitions included. Raises EgressError where a line is damaged."""
        try:
            entries = [json.loads(text) for text in _lines(self.path)]
            return sum(int(entry["bytes"]) for entry in entries if entry["round"] == server_round)
        except (ValueError, KeyError, TypeError) as error:
            raise EgressError("the ledger is damaged, nothing leaves until it is looked at") from error

    def _write_head(self, text: str) -> None:
        """Overwrites the head in place, in one write of always the same length, and does not wait for the disk.

        It may fall behind the ledger in a power cut, which it may anyway; waiting for it would double a message's cost.
        """
        descriptor = os.open(self.head, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, text.ljust(HEAD_BYTES).encode(), 0)
        finally:
            os.close(descriptor)

    def _end(self) -> tuple[int, str]:
        """Number and hash of the last line. A line torn by a crash is cut off: its reply never left."""
        data = self.path.read_bytes() if self.path.exists() else b""
        if data and not data.endswith(b"\n"):
            whole = data.rfind(b"\n") + 1
            os.truncate(self.path, whole)
            data = data[:whole]
        number, last, wrong = data.count(b"\n"), GENESIS, ""
        if number:
            text = data[data.rfind(b"\n", 0, -1) + 1 :].decode(errors="replace")
            wrong = _line_problem(text, number, None)
            last = GENESIS if wrong else json.loads(text)["sha256"]
        if wrong := wrong or _against_head(self.head, number, last).reason:
            raise EgressError(f"the ledger is damaged, nothing leaves until it is looked at: line {number}: {wrong}")
        return number, last


@dataclass(frozen=True)
class Verification:
    """The outcome of `verify`: true where the ledger is whole, else the first bad line and what is wrong with it."""

    entries: int
    last_sha256: str = GENESIS
    line: int | None = None
    reason: str = ""

    def __bool__(self) -> bool:
        return self.line is None

    def __str__(self) -> str:
        return f"{self.entries} entries, unbroken" if self else f"line {self.line}: {self.reason}"


def verify(path: str | Path) -> Verification:
    """Follows the chain of a ledger from its first line; a ledger that does not exist yet is whole and empty."""
    path = Path(path)
    previous, entries = GENESIS, 0
    for number, text in enumerate(_lines(path), 1):
        reason = _line_problem(text, number, previous)
        if reason:
            return Verification(entries, previous, number, reason)
        previous, entries = json.loads(text)["sha256"], number
    return _against_head(path.with_suffix(".head"), entries, previous)


def _lines(path: Path) -> Iterator[str]:
    if path.exists() and path.stat().st_size:
        # Not splitlines(): JSON may hold other line separators, such as U+2028, as they are.
        yield from path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")


def _line_problem(text: str, number: int, previous: str | None) -> str:
    try:
        entry = json.loads(text)
        claimed, before, counted = entry["sha256"], entry["previous"], entry["line"]
    except (ValueError, KeyError, TypeError):
        return "it cannot be read as an entry (cut off or overwritten)"
    if previous is not None and before != previous:
        return "it does not follow the line before (a line was removed, added or moved here)"
    if counted != number:
        return f"it says it is line {counted}"
    if claimed != _line_sha256(entry):
        return "its content was changed after it was written"
    return ""


def _against_head(head: Path, entries: int, last: str) -> Verification:
    """Compares with the head file, which may be behind (a crash between the two writes, or before the second)."""
    if not head.exists() or not head.stat().st_size:
        missing = entries > 1
        return Verification(entries, last, entries + 1 if missing else None, "the head file is gone" if missing else "")
    try:
        known = json.loads(head.read_text())
        written, sha256 = int(known["entries"]), str(known["sha256"])
    except (ValueError, KeyError, TypeError):
        return Verification(entries, last, entries + 1, "the head file cannot be read (overwritten)")
    if entries < written:
        reason = f"the ledger ends here, {written} entries were written (the end was cut off)"
        return Verification(entries, last, entries + 1, reason)
    if entries == written and last != sha256:
        return Verification(entries, last, entries, "it is not the line that was written last (the end was replaced)")
    return Verification(entries, last)


def _line_sha256(entry: dict[str, Any]) -> str:
    body = {key: value for key, value in entry.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """``verify PATH``: prints the outcome; exit code 0 whole, 1 damaged, 2 no such file."""
    parser = argparse.ArgumentParser(prog="python -m client_app.egress", description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["verify"])
    parser.add_argument("ledger", type=Path)
    chosen = parser.parse_args(arguments)
    if not chosen.ledger.exists():
        print(f"no ledger at {chosen.ledger}")
        return 2
    outcome = verify(chosen.ledger)
    print(f"{chosen.ledger}: {outcome}")
    return 0 if outcome else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Preflight at a site, before it joins: machine, data, kit and the way to the server, as one report.

    python -m deploy.doctor KITDIR [--json out.json]
    python -m deploy.doctor --node-config 'site="north" data-root="/data/fl" state-dir="/var/lib/fl"' [--json out.json]

Exit code 0: the site can join (there may be warnings); 1: something is to be mended first; 2: called wrongly.
The report names rows of the manifest by number; it holds no patient's identifier, image path or report text.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.doctor_finding import Finding, error, ok
from deploy.doctor_kit import (
    check_certificate,
    check_files,
    check_key,
    check_same_site,
    check_versions,
    check_weights,
    common_name,
    read_certificate,
    server_findings,
)
from deploy.doctor_machine import machine_findings
from deploy.kit import Kit, KitError, node_config, read_kit, versions
from federation.files import write_atomic
from federation.limits import LimitError, parse_limits

NODE_KEYS = ("site", "data-root", "state-dir")
COLOURS = {"ok": "green", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True)
class Subject:
    """What is examined: a node config and, where there is one, the kit that it lies in.

    Of the kit's list are read, beside what every kit has: ``min_train`` and ``min_positives`` (training samples, and
    positives of a label, that the federation asks for; default 1) and ``weights`` (absolute path -> SHA-256).
    """

    node: Mapping[str, Any]
    kit: Kit | None = None

    @property
    def listed(self) -> Mapping[str, Any]:
        return self.kit.listed if self.kit else {}

    def path(self, what: str) -> Path | None:
        """A file of the kit by what it is, None where the kit has none."""
        return self.kit.path(what) if self.kit and what in self.listed["paths"] else None


def parse_node_config(text: str) -> dict[str, str]:
    """Flower's ``--node-config``: ``key="value"`` pairs with blanks between, or the same as TOML lines.

    >>> parse_node_config('site="st mary" data-root=/data')
    {'site': 'st mary', 'data-root': '/data'}
    """
    try:
        return {key: str(value) for key, value in tomllib.loads(text).items()}
    except tomllib.TOMLDecodeError:
        pass
    try:
        pairs = [part.partition("=") for part in shlex.split(text)]
    except ValueError as problem:
        raise KitError(f"the node config cannot be read ({problem}); close its quotes") from problem
    if wrong := [key for key, sign, _ in pairs if not sign]:
        raise KitError(f'the node config has {wrong[0]!r} without a value, expected key="value"')
    return {key: value for key, _, value in pairs}


def examine(subject: Subject) -> list[Finding]:
    """Every check, in the order of the report. A check that fails itself is an error, and never a traceback."""
    node = subject.node
    if missing := [key for key in NODE_KEYS if not node.get(key)]:
        fix = "a hospital's node config names site, data-root and state-dir"
        return [error("node-config", f"the node config lacks {', '.join(missing)}", fix)]
    checks: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("machine", lambda: machine_findings(Path(str(node["state-dir"])).expanduser())),
        ("node config", lambda: [check_limits(node)]),
        ("kit", lambda: kit_findings(subject)),
        ("server", lambda: _server(subject)),
        ("data", lambda: _data(subject)),
    ]
    return [finding for name, check in checks for finding in _guarded(name, check)]


def _guarded(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as problem:  # its text may name files or cells, its kind does not
        sentence = f"the checks of the {name} ended with {type(problem).__name__}"
        return [error(name, sentence, "tell the operator which step this was")]


def kit_findings(subject: Subject) -> list[Finding]:
    """Files, names, certificates, key and weights of a kit; none without a kit."""
    if subject.kit is None:
        return []
    listed, now = subject.listed, datetime.now(UTC)
    findings = [check_files(subject.kit.folder, listed["files"]), check_versions(listed["versions"], versions())]
    named = {"the kit": subject.kit.name, "the node config": str(subject.node["site"])}
    authority, client, door = map(subject.path, ("ca", "client_certificate", "local_certificate"))
    if authority is not None:
        issuer = read_certificate(authority)
        findings.append(check_certificate("authority", issuer, issuer, now))
        if client is not None:
            certificate = read_certificate(client)
            named["the client certificate"] = common_name(certificate)
            findings.append(check_certificate("client", certificate, issuer, now))
        if door is not None:
            findings.append(check_certificate("loopback", read_certificate(door), issuer, now))
    private, public = subject.path("private_key"), subject.path("public_key")
    if private is not None and public is not None:
        findings += check_key(private.read_bytes(), private.stat().st_mode, public.read_bytes())
    findings += [check_weights(Path(path), digest) for path, digest in sorted(listed.get("weights", {}).items())]
    return [check_same_site(named), *findings]


def check_limits(node: Mapping[str, Any]) -> Finding:
    """What the node config allows, as the site itself will read it."""
    try:
        limits = parse_limits(node)
    except LimitError as problem:
        return error("node-limits", str(problem), "mend it in the node config: until then the site refuses everything")
    said = [f"methods {', '.join(sorted(limits.methods))}"] * bool(limits.methods)
    said += [f"hours {limits.hours[0]:%H:%M} to {limits.hours[1]:%H:%M}"] if limits.hours else []
    said += [f"{limits.max_upload_bytes / 1e6:g} MB a round"] * bool(limits.max_upload_bytes)
    words = f"the site takes part within its limits: {'; '.join(said)}"
    return ok("node-limits", words if said else "no limits are set")


def _server(subject: Subject) -> list[Finding]:
    address = str(subject.listed.get("server", ""))
    certificate, key = subject.path("client_certificate"), subject.path("client_key")
    client = (certificate, key) if certificate is not None and key is not None else None
    if not address:
        return []
    path = subject.path("private_key")
    private = None if path is None else path.read_bytes()
    return server_findings(address, authority=subject.path("ca"), client=client, private_key=private)


def _subject(folder: Path | None, config: str | None) -> Subject:
    if folder is None:
        return Subject(parse_node_config(str(config)))
    kit = read_kit(folder)
    if kit.kind != "site":
        raise KitError(f"{folder} is the kit of a {kit.kind}; the doctor looks at a hospital's")
    return Subject(node_config(kit), kit)


def _data(subject: Subject) -> list[Finding]:
    from deploy.doctor_data import data_findings  # in here: where a package is missing, the other checks still run

    node, listed = subject.node, subject.listed
    return data_findings(
        str(node["data-root"]),
        site=str(node["site"]),
        labels=tuple(listed.get("labels", ())),
        modalities=tuple(listed.get("modalities", ())),
        min_train=0 if listed.get("role") == "evaluate" else int(listed.get("min_train", 1)),
        min_positives=int(listed.get("min_positives", 1)),
    )


def report(findings: Sequence[Finding], site: str) -> Table:
    """The findings as one table, errors first."""
    order = {"error": 0, "warning": 1, "ok": 2}
    table = Table("", "check", "what was found", "what to do", title=f"preflight of {site}")
    for finding in sorted(findings, key=lambda finding: order[finding.level]):
        mark = f"[{COLOURS[finding.level]}]{finding.level}[/]"
        table.add_row(mark, finding.code, _plain(finding.sentence), _plain(finding.fix))
    return table


def _plain(text: str) -> str:
    return text.replace("[", r"\[")  # rich would read it as a style


def as_json(findings: Sequence[Finding], site: str) -> bytes:
    """The findings for a machine."""
    counts = {level: sum(finding.level == level for finding in findings) for level in COLOURS}
    content = {"site": site, "time": datetime.now(UTC).isoformat(timespec="seconds"), "counts": counts}
    return json.dumps({**content, "findings": [asdict(finding) for finding in findings]}, indent=1).encode()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m deploy.doctor", description=__doc__.split("\n")[0])
    parser.add_argument("kit", nargs="?", type=Path, help="folder of this site's kit")
    parser.add_argument("--node-config", help="a node config in place of a kit")
    parser.add_argument("--json", type=Path, help="file for the findings as JSON")
    chosen = parser.parse_args(arguments)
    if (chosen.kit is None) == (chosen.node_config is None):
        parser.error("give either the folder of a kit or --node-config")
    try:
        subject = _subject(chosen.kit, chosen.node_config)
    except KitError as problem:
        print(problem, file=sys.stderr)
        return 2
    findings, site = examine(subject), str(subject.node.get("site", "a site without a name"))
    Console(width=None if sys.stdout.isatty() else 160).print(report(findings, site))
    if chosen.json:
        write_atomic(chosen.json, as_json(findings, site), 0o644)
    return int(any(finding.level == "error" for finding in findings))


if __name__ == "__main__":
    raise SystemExit(main())

"""Abstract conditions of condition prompts ("background", "pose"): short phrases from a file, a shipped name or a list.

A condition file is JSON with its version, its phrases, the labels it was made for, where it comes from, and a SHA-256
over all of that, so that what a run used can be traced. Nothing here asks a language model: `models.condition_writer`
does, once and offline. Source: the project's fedmpt specification, section 14.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FORMAT = "consilium-conditions"
VERSION = 1
FOLDER = Path(__file__).parent / "condition_files"
MAX_CHARACTERS = 60
"""Longest phrase; the prompt around it has 77 tokens in all."""
KEYS = ("format", "version", "conditions", "labels", "provenance", "sha256")


class ConditionError(ValueError):
    """A list of conditions that cannot be used; the message says what to change."""


def conditions_in(text: str) -> tuple[str, ...]:
    """The conditions that a setting names: a shipped name, the path of a ``.json`` file, or phrases with commas.

    >>> conditions_in("background, pose")
    ('background', 'pose')

    Raises ConditionError as `load_conditions` and `checked` do, and for one phrase that looks like a shipped name.
    """
    text = text.strip()
    if text in shipped() or text.endswith(".json"):
        return load_conditions(text)
    if "," not in text and (near := difflib.get_close_matches(text, shipped(), 1, 0.7)):
        raise ConditionError(f"there are no conditions {text!r}; did you mean {near[0]!r}?")
    return checked([part.strip() for part in text.split(",")])


def load_conditions(name_or_path: str | Path) -> tuple[str, ...]:
    """The conditions of a shipped file, by its name, or of a condition file elsewhere.

    Raises ConditionError for a file that is not there, of another version, changed since it was written, or with
    phrases that `checked` refuses.
    """
    path = FOLDER / f"{name_or_path}.json" if str(name_or_path) in shipped() else Path(name_or_path).expanduser()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConditionError(
            f"the condition file {path.name} cannot be read ({error.strerror}); give a .json file or one of "
            f"{', '.join(shipped())}"
        ) from error
    except ValueError as error:
        raise ConditionError(f"the condition file {path.name} is no JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConditionError(f"{path.name} is no condition file: expected format {FORMAT!r}")
    if content.get("version") != VERSION:
        raise ConditionError(f"{path.name} has version {content.get('version')!r}, this code reads {VERSION}")
    if sorted(content) != sorted(KEYS):
        raise ConditionError(f"{path.name} has the keys {', '.join(sorted(content))}, expected {', '.join(KEYS)}")
    if (found := content_sha256(content)) != content["sha256"]:
        raise ConditionError(
            f"{path.name} was changed after it was written: SHA-256 {found}, the file says {content['sha256']}; write "
            "it anew with python -m server_app.conditions, or name the phrases in the setting"
        )
    conditions = content["conditions"]
    if not isinstance(conditions, list) or not all(isinstance(phrase, str) for phrase in conditions):
        raise ConditionError(f"{path.name} holds conditions {conditions!r}, expected a list of phrases")
    return checked(conditions)


def shipped() -> tuple[str, ...]:
    """Names of the condition files that come with the code."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def checked(conditions: Sequence[str]) -> tuple[str, ...]:
    """The phrases as they are, if there are some and none is empty, too long or there twice, whatever its case."""
    if not conditions:
        raise ConditionError("there is no condition; name at least one")
    seen: dict[str, str] = {}
    for phrase in conditions:
        key = " ".join(phrase.replace("_", " ").casefold().split())
        if not key:
            raise ConditionError(f"one of the conditions {list(conditions)} is empty; remove it")
        if len(phrase) > MAX_CHARACTERS:
            raise ConditionError(
                f"the condition {phrase[:MAX_CHARACTERS]!r}... is longer than {MAX_CHARACTERS} letters"
            )
        if key in seen:
            raise ConditionError(f"the conditions {seen[key]!r} and {phrase!r} are the same; remove one")
        seen[key] = phrase
    return tuple(conditions)


def condition_file(conditions: Sequence[str], labels: Sequence[str], provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a condition file, with its SHA-256; ``provenance``: where the phrases come from, JSON values."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "conditions": list(checked(conditions)),
        "labels": list(labels),
        "provenance": dict(provenance),
    }
    return {**content, "sha256": content_sha256(content)}


def content_sha256(content: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of everything but the key ``sha256``, as JSON with sorted keys."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, ensure_ascii=False).encode()).hexdigest()

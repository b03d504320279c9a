"""Conditions from a local language model, once and offline: combinations of labels, descriptions of them, conditions.

Stage 1 asks for short scenes in which labels appear together, with reasoning step by step; stage 2 asks to condense all
scenes into N abstract conditions that do not overlap. Source: the project's fedmpt specification, section 14; the
paper's model and its prompts are not published. Choice: the prompts below, greedy decoding, and only label names in
them, never a picture, a report or a patient.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from models.conditions import MAX_CHARACTERS, ConditionError

Ask = Callable[[str], str]
"""A language model: prompt to reply."""

DESCRIBE = (
    "These labels appear together in one {domain}: {labels}. Think step by step about why they would appear together, "
    "then write up to {count} short scene descriptions, each one line that starts with '- '."
)
CONDENSE = (
    "Here are descriptions of {domain}s:\n{scenes}\n\nWhat varies between them? Condense all of them into exactly "
    "{count} abstract conditions that do not overlap, such as 'background' or 'spatial layout': one to three words "
    "each, no label names, one a line that starts with '- '."
)
MORE = "{condense}\n\nThese are already there, name {count} others:\n{there}"
SCENES_A_COMBINATION = 5
MAX_SCENES = 100
MAX_WORDS = 4
ATTEMPTS = 3

_THOUGHT = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL | re.IGNORECASE)
_BULLET = re.compile(r"^\s*(?:[-*•–]+|\(?\d{1,3}[.):]|[a-z][.)])\s+", re.IGNORECASE)
_EXPLAINED = re.compile(r"\s*(?::|\s[-–—]\s|\()")


class Written(NamedTuple):
    """What a model gave: the conditions, and the scenes they were condensed from."""

    conditions: tuple[str, ...]
    scenes: tuple[str, ...]


def label_combinations(
    targets: np.ndarray, *, min_count: int = 5, limit: int = 50, largest: int = 4
) -> list[tuple[int, ...]]:
    """Sets of 2 to ``largest`` labels that ``min_count`` rows or more of ``targets (n, C)`` have as their positives.

    The most frequent first (ties: the lower labels), ``limit`` at most. Rarer sets are left out: one that a single
    patient has would tell of that patient. Unknown labels (-1) count as absent.
    """
    rows = (np.asarray(targets) == 1).astype(np.int8)
    found, counts = np.unique(rows, axis=0, return_counts=True)
    sets = [(int(count), tuple(np.flatnonzero(row).tolist())) for row, count in zip(found, counts, strict=True)]
    kept = [(count, labels) for count, labels in sets if count >= min_count and 2 <= len(labels) <= largest]
    return [labels for _, labels in sorted(kept, key=lambda item: (-item[0], item[1]))[:limit]]


def label_pairs(num_labels: int, rng: np.random.Generator, limit: int = 50) -> list[tuple[int, ...]]:
    """All pairs of labels, or ``limit`` of them by lot, in order: what there is to ask about without data."""
    pairs = list(combinations(range(num_labels), 2))
    if len(pairs) > limit:
        pairs = [pairs[index] for index in sorted(rng.choice(len(pairs), limit, replace=False))]
    return pairs


def write_conditions(
    ask: Ask, labels: Sequence[str], together: Sequence[Sequence[int]], count: int, domain: str = "picture"
) -> Written:
    """Asks for scenes of every combination of label numbers, then for ``count`` conditions.

    A model that names fewer is asked for the missing ones again, 3 times at most. Raises ConditionError where it gave
    no scene, or still fewer conditions.
    """
    scenes: list[str] = []
    for numbers in together:
        names = ", ".join(labels[number] for number in numbers)
        reply = ask(DESCRIBE.format(domain=domain, labels=names, count=SCENES_A_COMBINATION))
        scenes += [scene for scene in lines_in(reply)[:SCENES_A_COMBINATION] if scene not in scenes]
    if not scenes:
        raise ConditionError("the model described no scene; use an instruction-tuned model")
    listed = "\n".join(f"- {scene}" for scene in scenes[:MAX_SCENES])
    condense = CONDENSE.format(domain=domain, scenes=listed, count=count)
    found = phrases_in(ask(condense), labels)[:count]
    for _ in range(ATTEMPTS - 1):
        if len(found) == count:
            break
        there = "\n".join(f"- {phrase}" for phrase in found)
        more = phrases_in(ask(MORE.format(condense=condense, count=count - len(found), there=there)), labels)
        found = _distinct([*found, *more])[:count]
    if len(found) < count:
        raise ConditionError(
            f"the model named {len(found)} of {count} conditions ({', '.join(found) or 'none'}); ask for fewer with "
            "--count, or use a larger instruction-tuned model"
        )
    return Written(tuple(found), tuple(scenes))


def lines_in(reply: str) -> list[str]:
    """The listed lines of a reply without their bullets; without any bullet all its lines. Thoughts are dropped.

    >>> lines_in("Sure! Here you go:\\n1. A cat on a **sofa**.\\n2. A dog.")
    ['A cat on a sofa.', 'A dog.']
    """
    lines = [line.strip() for line in _THOUGHT.sub("", reply).splitlines() if line.strip()]
    listed = [line for line in lines if _BULLET.match(line)]
    cleaned = (_BULLET.sub("", line).replace("**", "").replace("`", "").strip(" \"'“”") for line in listed or lines)
    return [line for line in cleaned if line and not line.endswith(":")]


def phrases_in(reply: str, labels: Sequence[str] = ()) -> list[str]:
    """Short phrases that a reply lists, as lines, as a JSON array or with commas; lower case, each once.

    Explanations after a colon, a dash or in brackets are cut off. What is longer than four words, and what is a label,
    is no abstract condition.

    >>> phrases_in("1. **Background** - what is behind\\n2. Pose: how it stands\\n3. background")
    ['background', 'pose']
    """
    text = _THOUGHT.sub("", reply)
    parts = _json_list(text)
    if parts is None:
        parts = lines_in(text)
        if len(parts) == 1 and "," in parts[0]:
            parts = parts[0].partition(":")[2].split(",") if ":" in parts[0] else parts[0].split(",")
    taken = {_key(label) for label in labels}
    phrases = (_EXPLAINED.split(part.strip(" \t\"'“”.;"), maxsplit=1)[0] for part in parts)
    phrases = [" ".join(phrase.strip(" \t\"'“”*_.;").replace("_", " ").lower().split()) for phrase in phrases]
    return _distinct(
        [
            phrase
            for phrase in phrases
            if re.search(r"[^\W\d_]", phrase)
            and len(phrase.split()) <= MAX_WORDS
            and len(phrase) <= MAX_CHARACTERS
            and _key(phrase) not in taken
        ]
    )


class LocalModel:
    """An instruction model of a local transformers folder; called with a prompt it gives its greedy reply.

    Raises ConditionError for a folder that transformers cannot open, and nothing is ever downloaded.
    """

    def __init__(self, folder: str | Path, max_new_tokens: int = 1024) -> None:
        self.folder = Path(folder).expanduser()
        if not (self.folder / "config.json").is_file():
            raise ConditionError(
                f"there is no language model in {self.folder.name!r}; give --model a folder with config.json, "
                "model.safetensors and a tokeniser, as transformers saves them. Without a model, name the conditions "
                "in the setting yourself or use a shipped list: a federated run never needs one"
            )
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError as error:
            raise ConditionError("writing conditions needs transformers; pip install transformers") from error
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
            self._model = AutoModelForCausalLM.from_pretrained(
                self.folder, local_files_only=True, use_safetensors=True
            ).eval()
        except (OSError, ValueError, KeyError) as error:
            raise ConditionError(f"transformers cannot open the model in {self.folder.name!r}: {error}") from error
        self._max_new_tokens = max_new_tokens

    def __call__(self, prompt: str) -> str:
        tokenizer = self._tokenizer
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        given = tokenizer(prompt, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)
        ids = given["input_ids"]
        written = self._model.generate(
            ids,
            attention_mask=given["attention_mask"],
            do_sample=False,
            max_new_tokens=self._max_new_tokens,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
        return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)

    def sha256(self) -> str:
        """SHA-256 (hex) of all files of the folder by name."""
        digest = hashlib.sha256()
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            digest.update(path.relative_to(self.folder).as_posix().encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def _json_list(text: str) -> list[str] | None:
    start, end = text.find("["), text.rfind("]")
    if not 0 <= start < end:
        return None
    try:
        content: Any = json.loads(text[start : end + 1])
    except ValueError:
        return None
    return [part for part in content if isinstance(part, str)] if isinstance(content, list) else None


def _distinct(phrases: Sequence[str]) -> list[str]:
    found: dict[str, str] = {}
    for phrase in phrases:
        found.setdefault(_key(phrase), phrase)
    return list(found.values())


def _key(phrase: str) -> str:
    """The same for what reads the same: case, underscores and a plural s do not count."""
    return " ".join(phrase.replace("_", " ").casefold().split()).removesuffix("s")

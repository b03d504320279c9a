"""Reports to numbers: tokenisers that need no network and no shared vocabulary, and the text encoder.

The project's incongruent specification, sections 3.1 and 3.2. Nothing is ever downloaded: a vocabulary and weights
come from a local folder or not at all.
"""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

# transformers takes two seconds to import, and a site without reports never needs it: it is imported where it is used.

MAX_LENGTH = 128
VOCAB_SIZE = 8192
PAD, CLS, SEP = 0, 1, 2
WORDS_FROM = 3
WORD = re.compile(r"\w+|[^\w\s]")

TEXT_CONFIGS = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
    "small": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
"""BERT by name; ``base`` is bert-base. With a vocabulary of 30,522 ``small`` is the published BERT 2x128."""


class Tokens(NamedTuple):
    """``ids (n, L) int64``, padded at the end to the longest report, and how many reports were cut."""

    ids: Tensor
    truncated: int


class Tokenizer(Protocol):
    """Reports to `Tokens`. A report without a word is a row of padding: it counts as absent (spec 9).

    ``sha256``: of everything that decides the ids. Sites whose tokenisers differ must not share a text encoder.
    """

    vocab_size: int
    sha256: str

    def __call__(self, reports: Sequence[str]) -> Tokens: ...


class HashingTokenizer:
    """Every word is its own hash: the same ids at every site, without a vocabulary that would have to be shared.

    Words and punctuation marks of the report, Unicode compatibility form, case folded, give ids from 3 to
    ``vocab_size`` - 1 (BLAKE2b; two words may share one). 0 is padding, 1 opens and 2 closes a report, as in BERT. Of a
    report longer than ``max_length`` ids the beginning is kept.

    >>> HashingTokenizer(1000)(["No effusion.", ""]).ids
    tensor([[  1, 207, 180, 552,   2],
            [  0,   0,   0,   0,   0]])
    """

    def __init__(self, vocab_size: int = VOCAB_SIZE, max_length: int = MAX_LENGTH) -> None:
        if vocab_size <= WORDS_FROM or max_length < 3:
            raise ValueError(
                f"vocab_size={vocab_size} must be above {WORDS_FROM} and max_length={max_length} at least 3"
            )
        self.vocab_size, self.max_length = vocab_size, max_length
        self.sha256 = _sha256(f"hashing words {vocab_size} {max_length}")

    def __call__(self, reports: Sequence[str]) -> Tokens:
        rows, truncated = [], 0
        for report in reports:
            words = WORD.findall(unicodedata.normalize("NFKC", report).casefold())
            truncated += len(words) > self.max_length - 2
            ids = [WORDS_FROM + _hash(word) % (self.vocab_size - WORDS_FROM) for word in words[: self.max_length - 2]]
            rows.append(torch.tensor([CLS, *ids, SEP] if ids else [PAD]))
        if not rows:
            return Tokens(torch.zeros(0, 1, dtype=torch.int64), 0)
        return Tokens(nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD), truncated)


@functools.lru_cache(maxsize=65_536)
def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class FolderTokenizer:
    """The tokeniser in a local folder, as `transformers` saves it next to a model's weights."""

    def __init__(self, folder: str | Path, max_length: int = MAX_LENGTH) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(_folder(folder), local_files_only=True)
        if not self._tokenizer.is_fast or self._tokenizer.pad_token_id is None:
            raise ValueError(f"{Path(folder).name} must hold a fast tokeniser (tokenizer.json) with a padding token")
        self._tokenizer.padding_side = self._tokenizer.truncation_side = "right"
        self.vocab_size, self.max_length = len(self._tokenizer), max_length
        self.sha256 = _sha256(f"{self._tokenizer.backend_tokenizer.to_str()} {max_length}")

    def __call__(self, reports: Sequence[str]) -> Tokens:
        if not reports:
            return Tokens(torch.zeros(0, 1, dtype=torch.int64), 0)
        given = self._tokenizer(
            list(reports),
            truncation=True,
            max_length=self.max_length,
            padding=True,
            return_overflowing_tokens=True,
            return_tensors="pt",
        )
        # what overflows comes as further rows of the same report, after its first
        _, parts = given["overflow_to_sample_mapping"].unique_consecutive(return_counts=True)
        ids = given["input_ids"][parts.cumsum(0) - parts]
        blank = torch.tensor([not report.strip() for report in reports])
        return Tokens(ids.masked_fill(blank[:, None], self._tokenizer.pad_token_id), int((parts > 1).sum()))


def build_tokenizer(folder: str = "", *, vocab_size: int = VOCAB_SIZE, max_length: int = MAX_LENGTH) -> Tokenizer:
    """The tokeniser of a local folder, or the hashing one where no folder is given."""
    return FolderTokenizer(folder, max_length) if folder else HashingTokenizer(vocab_size, max_length)


class TextEncoder(nn.Module):
    """Tokens ``(B, L) int64`` to z ``(B, d)``: hidden state at position 0 of ``backbone``, projected.

    ``backbone``: a `transformers` encoder, see `build_text_encoder`. A batch is cut to its longest report first: most
    are far shorter than 128 tokens, and padding changes nothing but rounding.
    """

    def __init__(self, backbone: nn.Module, dim: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.projection = nn.Linear(backbone.config.hidden_size, dim)
        restore_buffers(self)

    def forward(self, tokens: Tensor, with_tokens: bool = False) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """z, and with ``with_tokens`` all states projected ``(B, L', d)`` and which are real ``(B, L') bool``."""
        config = self.backbone.config
        if tokens.ndim != 2 or tokens.dtype != torch.int64 or tokens.shape[1] > config.max_position_embeddings:
            raise ValueError(
                f"expected tokens (B, L) int64 with L up to {config.max_position_embeddings}, "
                f"got {tokens.dtype} {tuple(tokens.shape)}"
            )
        valid = tokens != config.pad_token_id
        length = max(1, int(valid.any(dim=0).sum()))
        tokens, valid = tokens[:, :length], valid[:, :length]
        states = self.backbone(input_ids=tokens, attention_mask=valid.long()).last_hidden_state
        if not with_tokens:
            return self.projection(states[:, 0]), None, None
        states = self.projection(states)
        return states[:, 0], states, valid


def build_text_encoder(name: str = "tiny", *, dim: int, folder: str = "", vocab_size: int = VOCAB_SIZE) -> TextEncoder:
    """A `TextEncoder` of width ``dim``: a BERT of `TEXT_CONFIGS` with random weights, or the model in a local folder.

    A folder holds what `transformers` saves, ``config.json`` and ``model.safetensors``; its name and vocabulary win
    over ``name`` and ``vocab_size``. Under ``torch.device("meta")`` only its configuration is read. A pooling layer is
    left out. Raises ValueError for an unknown name, a folder that is not there, or a model whose state dict does not
    hold everything that it computes with.
    """
    from transformers import AutoConfig, AutoModel, BertConfig, BertModel

    if folder:
        place = _folder(folder)
        if torch.get_default_device().type == "meta":
            backbone = AutoModel.from_config(AutoConfig.from_pretrained(place, local_files_only=True))
        else:
            backbone = AutoModel.from_pretrained(place, local_files_only=True, use_safetensors=True)
        backbone.pooler = None
        return TextEncoder(backbone.float(), dim)
    if name not in TEXT_CONFIGS:
        raise ValueError(f"no text encoder {name!r}; there are {', '.join(TEXT_CONFIGS)}, or give a folder")
    config: dict[str, Any] = {"vocab_size": vocab_size, "pad_token_id": PAD, **TEXT_CONFIGS[name]}
    return TextEncoder(BertModel(BertConfig(**config), add_pooling_layer=False), dim)


def restore_buffers(module: nn.Module) -> None:
    """Writes the buffers that no state dict holds (BERT's position numbers) again, as after `to_empty`.

    Raises ValueError for a module with such a buffer of another kind.
    """
    saved = set(module.state_dict())
    for name, buffer in module.named_buffers():
        if name in saved:
            continue
        kind = name.rpartition(".")[2]
        if kind == "position_ids":
            buffer.copy_(torch.arange(buffer.shape[-1], device=buffer.device).expand_as(buffer))
        elif kind == "token_type_ids":
            buffer.zero_()
        else:
            raise ValueError(f"the text model keeps {name!r} outside its state dict; BERT-like models do not")


def _folder(folder: str | Path) -> Path:
    """Raises ValueError where it is none: a name that is no folder would be looked up on a hub."""
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise ValueError(
            f"no folder {str(folder)!r}; the text model and its tokeniser are read from a local folder only"
        )
    return place

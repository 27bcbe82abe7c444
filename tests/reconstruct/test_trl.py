"""TRL trains on what is exported: one step of its own trainer, on the CPU."""

import json

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from bridle.engine.contract.tokenizer import Tokenizer
from bridle.recipes.models.tiny import TinyShape, make_policy
from bridle.recipes.models.tiny_tokenizer import train_tokenizer
from bridle.reconstruct.exports.formats import export
from bridle.reconstruct.exports.parquet import export_parquet
from support.parquet import read_samples

TEXTS = ["What is 2 plus 3? The answer is 5.", json.dumps({"name": "add"})] * 20
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "a plus b", "parameters": {"type": "object"}},
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("policy")
    train_tokenizer(directory, TEXTS, vocab_size=400)
    make_policy(directory, TinyShape(), vocab_size=400)
    return directory


@pytest.fixture
def recorded(record, policy):
    """A tool call and an answer, their tokens as the policy's own template renders them."""
    tokenizer = Tokenizer(policy)
    session = record()
    asked = [{"role": "user", "content": "What is 2 plus 3?"}]
    function = {"name": "add", "arguments": '{"a": 2}'}
    called = {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c1", "type": "function", "function": function}]}  # fmt: skip
    first_prompt, first_ids = [1, 2, 3], tokenizer.encode("The answer")
    first = session.call(
        first_prompt,
        first_ids,
        conversation={"tail": asked, "tools": [TOOL], "lineage": {"base": None, "choice": 0}},
        message=called,
    )
    answer = {"role": "tool", "tool_call_id": "c1", "content": "5"}
    session.call(
        [*first_prompt, *first_ids, 4],
        tokenizer.encode("is 5."),
        parent=first,
        conversation={"tail": [answer], "lineage": {"base": first, "choice": 0}},
        message={"role": "assistant", "content": "The answer is 5."},
    )
    return session


@pytest.fixture
def one_step(policy, tmp_path):
    """``one_step(dataset)``: the labels that TRL trains on, after a step with a finite loss."""

    def train(dataset, **options):
        arguments = SFTConfig(
            output_dir=str(tmp_path / "out"),
            max_steps=1,
            per_device_train_batch_size=1,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            gradient_checkpointing=False,
            **options,
        )
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(policy),
            args=arguments,
            train_dataset=dataset,
            processing_class=AutoTokenizer.from_pretrained(policy),
        )
        batch = next(iter(trainer.get_train_dataloader()))
        loss = trainer.train().training_loss
        assert 0 < loss < 100
        return batch["input_ids"][0].tolist(), batch["labels"][0].tolist()

    return train


def load(kind, path, tmp_path):
    return datasets.load_dataset(
        kind, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )


@pytest.mark.parametrize("form", ["trl", "trl-prompt-completion"])
def test_trl_trains_a_step_on_conversations_with_tools(
    reader, recorded, one_step, policy, tmp_path, form
):
    path = tmp_path / "x.jsonl"
    assert export(reader, path, form).rows
    ids, labels = one_step(load("json", path, tmp_path))
    text = AutoTokenizer.from_pretrained(policy).decode(ids)
    assert '"name": "add"' in text, "the tool's schema is rendered"
    learned = [label for label in labels if label != -100]
    assert 0 < len(learned) <= len(ids)
    if form == "trl-prompt-completion":
        assert len(learned) < len(ids), "the prompt is not learned"


def test_trl_trains_the_recorded_tokens_and_only_those_of_the_mask(
    reader, recorded, one_step, tmp_path
):
    path = tmp_path / "x.parquet"
    export_parquet(reader, path)
    (sample,) = read_samples(path)
    dataset = load("parquet", path, tmp_path).map(
        lambda row: {
            "input_ids": row["token_ids"],
            "labels": [
                token if learned else -100
                for token, learned in zip(row["token_ids"], row["mask"], strict=True)
            ],
        },
        remove_columns=load("parquet", path, tmp_path).column_names,
    )
    ids, labels = one_step(dataset)
    assert ids == sample.token_ids.tolist()
    assert [label != -100 for label in labels] == sample.mask.tolist()

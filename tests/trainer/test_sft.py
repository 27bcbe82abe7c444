import json
import shutil
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from rich.console import Console
from tokenizers.processors import TemplateProcessing

from bridle.engine.contract.tokenizer import CHAT_TEMPLATE_FILE, Tokenizer
from bridle.trainer.config import OptimizerConfig, PackingConfig, SftConfig
from bridle.trainer.learner.learner import Learner
from bridle.trainer.policy.model import load_policy, score_sequence
from bridle.trainer.sft.data import (
    SftDataError,
    SftExample,
    example_from_text,
    examples_from_chat,
    examples_from_jsonl,
    examples_from_parquet,
    with_context,
    without_shared,
)
from bridle.trainer.sft.sft import steps_of, train_sft

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "lookup", "arguments": '{"city": "Oslo"}'},
}
TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {}}}]
CONVERSATION = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": "What is the capital of Norway?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "Oslo"},
    {"role": "assistant", "content": "Oslo."},
]


@pytest.fixture
def tokenizer(chat_directory):
    return Tokenizer(chat_directory)


def learned_texts(example, tokenizer):
    """The learned tokens as text, one string per run of them."""
    runs, previous = [], False
    for token, learned in zip(example.token_ids.tolist(), example.mask, strict=True):
        if learned and not previous:
            runs.append([])
        if learned:
            runs[-1].append(token)
        previous = learned
    return [tokenizer.decode(run) for run in runs]


def test_exactly_the_assistants_replies_are_learned_up_to_their_end_of_turn(tokenizer):
    (example,) = examples_from_chat(CONVERSATION, TOOLS, tokenizer)
    assert learned_texts(example, tokenizer) == [
        '<tool_call>\n{"name": "lookup", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>',
        "Oslo.<|im_end|>",
    ]
    text = tokenizer.decode(example.token_ids.tolist())
    assert text + "\n" == tokenizer.render(CONVERSATION, TOOLS, add_generation_prompt=False)


def test_each_prompt_is_tokenised_as_the_engine_would(tokenizer):
    (example,) = examples_from_chat(CONVERSATION, TOOLS, tokenizer)
    prompt = tokenizer.encode(tokenizer.render(CONVERSATION[:2], TOOLS))
    assert example.token_ids[: len(prompt)].tolist() == prompt
    assert not example.mask[: len(prompt)].any()
    assert example.mask[len(prompt)]


def test_a_message_of_weight_zero_is_context_only(tokenizer):
    muted = [*CONVERSATION[:2], {**CONVERSATION[2], "weight": 0}, *CONVERSATION[3:]]
    (example,) = examples_from_chat(muted, TOOLS, tokenizer)
    assert learned_texts(example, tokenizer) == ["Oslo.<|im_end|>"]


def test_a_template_that_rewrites_history_gives_one_example_per_prefix(chat_directory, tmp_path):
    shutil.copytree(chat_directory, tmp_path, dirs_exist_ok=True)
    kept = "{%- if message.reasoning_content %}"
    dropped_in_history = "{%- if message.reasoning_content and loop.last %}"
    source = (chat_directory / CHAT_TEMPLATE_FILE).read_text()
    (tmp_path / CHAT_TEMPLATE_FILE).write_text(source.replace(kept, dropped_in_history))
    tokenizer = Tokenizer(tmp_path)
    turn = {"role": "assistant", "content": "Oslo.", "reasoning": "Think."}
    messages = [CONVERSATION[1], turn, {"role": "user", "content": "Sure?"}, turn]
    first, second = examples_from_chat(messages, None, tokenizer)
    reply = "<think>\nThink.\n</think>\n\nOslo.<|im_end|>"
    assert learned_texts(first, tokenizer) == [reply]
    assert learned_texts(second, tokenizer) == [reply]
    assert tokenizer.decode(second.token_ids.tolist()).count("Think.") == 1


def test_jsonl_lines_become_examples_and_a_bad_line_is_named(tokenizer, tmp_path):
    path = tmp_path / "chat.jsonl"
    line = json.dumps({"messages": CONVERSATION, "tools": TOOLS})
    path.write_text(f"{line}\n\n{line}\n")
    assert len(examples_from_jsonl(path, tokenizer, Counter())) == 2
    for bad, why in (
        (b'{"prompt": 1}', "neither messages nor a prompt with its completion; exports as tokens"),
        (b"[]", "not an object; exports as tokens, chat, trl and trl-prompt-completion can be"),
        (b"{", "neither Parquet nor JSON .*; exports as tokens"),
        (b"\xff", "neither Parquet nor JSON .*; exports as tokens"),
        (b'{"messages": "What?"}', "messages: no list of objects"),
        (b'{"messages": ["What?"]}', "messages: no list of objects"),
        (b'{"prompt": [], "completion": [1]}', "completion: no list of objects"),
        (b'{"prompt": 1, "completion": []}', "prompt: no list of objects"),
        (b'{"prompt": "What?", "completion": []}', "only one is text"),
    ):
        path.write_bytes(line.encode() + b"\n" + bad + b"\n")
        with pytest.raises(SftDataError, match=rf"chat\.jsonl:2: .*{why}"):
            examples_from_jsonl(path, tokenizer, Counter())


def test_of_a_prompt_and_its_completion_only_the_completion_is_learned(tokenizer, tmp_path):
    path = tmp_path / "trl.jsonl"
    rows = [
        {"prompt": CONVERSATION[:end], "completion": CONVERSATION[end : end + 1], "tools": TOOLS}
        for end in (2, 4)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = examples_from_jsonl(path, tokenizer, Counter())
    (whole,) = examples_from_chat(CONVERSATION, TOOLS, tokenizer)
    assert second.token_ids.tolist() == whole.token_ids.tolist()
    assert first.token_ids.tolist() == whole.token_ids[: len(first.token_ids)].tolist()
    learned = np.zeros(len(whole.mask), dtype=bool)
    for example in (first, second):
        assert not learned[: len(example.mask)][example.mask].any()
        learned[: len(example.mask)] |= example.mask
    assert learned.tolist() == whole.mask.tolist()


def test_a_reply_is_learned_to_its_end_where_the_model_is_configured_with_another(
    chat_directory, tmp_path
):
    """The model is a base model whose tokenizer was given a chat template and its end of turn."""
    shutil.copytree(chat_directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    tokenizer = Tokenizer(tmp_path)
    (example,) = examples_from_chat(
        [{"role": "user", "content": "Norway?"}, {"role": "assistant", "content": "Oslo."}],
        None,
        tokenizer,
    )
    assert learned_texts(example, tokenizer) == ["Oslo.<|im_end|>"]


def test_a_completed_text_is_learned_to_its_end(tokenizer, tmp_path):
    path = tmp_path / "trl.jsonl"
    end = tokenizer.special_tokens["eos_token"]
    rows = [{"prompt": "Norway?", "completion": said} for said in (" Oslo.", f" Oslo.{end}")]
    path.write_text("\n".join(map(json.dumps, rows)))
    for example in examples_from_jsonl(path, tokenizer, Counter()):
        assert learned_texts(example, tokenizer) == [f" Oslo.{end}"]
        assert tokenizer.decode(example.token_ids.tolist()) == f"Norway? Oslo.{end}"


@pytest.mark.parametrize("template", ["<|im_start|> $A", "<|im_start|> $A <|im_end|>"])
def test_a_completed_text_begins_as_the_tokenizer_lets_a_text_begin(
    chat_directory, tmp_path, template
):
    shutil.copytree(chat_directory, tmp_path, dirs_exist_ok=True)
    tokenizer = Tokenizer(tmp_path)
    beginning = tokenizer.token_id("<|im_start|>")
    end = tokenizer.token_id("<|im_end|>")
    tokenizer.backend.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<|im_start|>", beginning), ("<|im_end|>", end)]
    )
    example = example_from_text("Norway?", " Oslo.", tokenizer)
    assert example.token_ids.tolist().count(end) == 1
    assert example.token_ids[-1] == end
    assert example.token_ids[0] == beginning
    assert example.token_ids.tolist().count(beginning) == 1
    assert not example.mask[0]


def test_tools_told_as_text_are_those_told_as_a_list(tokenizer, tmp_path):
    path = tmp_path / "trl.jsonl"
    path.write_text(json.dumps({"messages": CONVERSATION, "tools": json.dumps(TOOLS)}))
    (found,) = examples_from_jsonl(path, tokenizer, Counter())
    (expected,) = examples_from_chat(CONVERSATION, TOOLS, tokenizer)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    for tools in ("[", '{"name": "lookup"}', {"name": "lookup"}):
        path.write_text(json.dumps({"messages": CONVERSATION, "tools": tools}))
        with pytest.raises(SftDataError, match=r"trl\.jsonl:1: its tools are no list"):
            examples_from_jsonl(path, tokenizer, Counter())


def test_a_line_whose_tool_arguments_are_no_json_is_left_out_and_counted(tokenizer, tmp_path):
    path = tmp_path / "chat.jsonl"
    function = {"name": "lookup", "arguments": '{"city"'}
    broken = CONVERSATION[2] | {"tool_calls": [CALL | {"function": function}]}
    bad = [*CONVERSATION, CONVERSATION[1], broken]
    path.write_text("\n".join(json.dumps({"messages": said}) for said in (bad, CONVERSATION)))
    left_out = Counter()
    assert len(examples_from_jsonl(path, tokenizer, left_out)) == 1
    assert left_out == {"tool_arguments_not_json": 1}


def test_parquet_rows_become_examples(tmp_path):
    path = tmp_path / "tokens.parquet"
    columns = {"token_ids": [[1, 2, 3], [4, 5]], "mask": [[False, True, True], [False, False]]}
    pyarrow.parquet.write_table(pa.table(columns), path)
    (example,) = examples_from_parquet(path)
    assert example.token_ids.tolist() == [1, 2, 3]
    assert example.mask.tolist() == [False, True, True]
    with pytest.raises(SftDataError, match="no column 'loss_mask'; there are token_ids, mask"):
        examples_from_parquet(path, mask_column="loss_mask")
    columns["mask"][0] = [True]
    pyarrow.parquet.write_table(pa.table(columns), path)
    with pytest.raises(SftDataError, match="row 0 has 3 ids and 1 mask"):
        examples_from_parquet(path)


def small_set():
    generator = np.random.default_rng(0)
    prompt = generator.integers(3, 64, 12)
    return [
        SftExample(
            np.concatenate([prompt, [3 + i], generator.integers(3, 64, 6)]).astype(np.uint32),
            np.arange(19) >= 13,
        )
        for i in range(8)
    ]


def test_a_shortened_example_learns_the_same_tokens_behind_less():
    example = SftExample(np.arange(19, dtype=np.uint32), np.arange(19) % 10 >= 8)
    shorter = with_context(example, 3)
    assert shorter.token_ids.tolist() == list(range(5, 19))
    assert shorter.token_ids[shorter.mask].tolist() == [8, 9, 18]
    whole = with_context(example, 100)
    assert (whole.token_ids.tolist(), whole.mask.tolist()) == (
        example.token_ids.tolist(),
        example.mask.tolist(),
    )


def asked(task, reply):
    ids = np.array([*range(10, 20), *task, *range(30, 40), *reply], dtype=np.uint32)
    return SftExample(ids, np.arange(len(ids)) >= len(ids) - len(reply))


def test_what_all_prompts_share_can_be_left_out():
    one, two = without_shared([asked([1, 2], [1]), asked([3], [3, 4])], 2)
    assert one.token_ids.tolist() == [18, 19, 1, 2, 30, 31, 38, 39, 1]
    assert two.token_ids.tolist() == [18, 19, 3, 30, 31, 38, 39, 3, 4]
    assert two.token_ids[two.mask].tolist() == [3, 4]


@pytest.mark.parametrize("tokens", [5, 10, 100])
def test_what_is_kept_of_the_shared_part_is_kept_once(tokens):
    examples = [asked([1, 2], [1]), asked([3], [3, 4])]
    for before, after in zip(examples, without_shared(examples, tokens), strict=True):
        start = max(0, 10 - tokens)
        assert after.token_ids.tolist() == before.token_ids[start:].tolist()


def test_a_piece_of_what_is_left_out_stays_and_is_another_one_each_time():
    examples = [asked([1, 2], [1]), asked([3], [3, 4])]
    kept = set()
    for seed in range(50):
        for example in without_shared(examples, 2, piece=4, seed=seed):
            ids = example.token_ids.tolist()
            first = [token for token in ids if token in range(10, 18)]
            last = [token for token in ids if token in range(32, 38)]
            for piece in (first, last):
                assert piece == list(range(piece[0], piece[0] + len(piece)))
                assert 1 <= len(piece) <= 4
            kept.add((*first, *last))
            assert [token for token in ids if token not in {*first, *last}] in (
                [18, 19, 1, 2, 30, 31, 38, 39, 1],
                [18, 19, 3, 30, 31, 38, 39, 3, 4],
            )
    assert {token for piece in kept for token in piece} == {*range(10, 18), *range(32, 38)}
    assert len(kept) > 20


def test_equal_prompts_share_all_there_is():
    examples = [asked([1], [1]), asked([1], [2])]
    for example in without_shared(examples, 3):
        assert example.token_ids.tolist()[:-1] == [37, 38, 39]
    assert without_shared([], 3) == []


@pytest.mark.parametrize("layout", ["tree", "padded"])
@pytest.mark.sampled(2)
def test_sft_learns_a_small_set_by_heart(policy, layout):
    examples = small_set()
    config = SftConfig(
        epochs=40,
        batch_size=4,
        optimizer=OptimizerConfig(learning_rate=1e-2, schedule="cosine", warmup_steps=5),
        packing=PackingConfig(layout=layout),
    )
    history = train_sft(Learner(policy, config), examples, config)
    assert len(history) == steps_of(8, config.epochs, config.batch_size) == 80
    assert history[0].loss > 3.0
    assert history[-1].loss < 0.05
    for example in examples:
        logprobs = score_sequence(policy, example.token_ids.astype(np.int64))
        assert logprobs[12:].mean() > -0.1


def test_tokens_outside_the_mask_teach_nothing(policy_directory):
    """Changing a token that is neither learned nor before a learned one changes no weight."""
    results = []
    for last in (5, 6):
        policy = load_policy(policy_directory)
        ids = np.asarray([1, 2, 3, 4, last], dtype=np.uint32)
        example = SftExample(ids, np.asarray([0, 0, 1, 1, 0]) > 0)
        train_sft(Learner(policy, SftConfig()), [example], SftConfig())
        results.append([p.detach().numpy().copy() for p in policy.parameters()])
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)


def test_nothing_to_learn_is_an_error(policy):
    nothing = SftExample(np.asarray([1, 2]), np.zeros(2, dtype=bool))
    with pytest.raises(ValueError, match="no example"):
        train_sft(Learner(policy, SftConfig()), [nothing], SftConfig())


def test_a_progress_bar_shows_the_loss_and_the_caller_may_stop(policy):
    console = Console(record=True, width=100, force_terminal=True)
    config = SftConfig(epochs=5, batch_size=4)
    history = train_sft(
        Learner(policy, config),
        small_set(),
        config,
        on_step=lambda step: step.step == 2,
        console=console,
    )
    assert len(history) == 3
    shown = console.export_text()
    assert "3/10" in shown
    assert "loss" in shown

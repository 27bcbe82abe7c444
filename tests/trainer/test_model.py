import shutil

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
)

from bridle.trainer.batch import attention, blocks, scored
from bridle.trainer.batch.packing import make_packs
from bridle.trainer.config import ComputeConfig, GrpoConfig, LoraConfig, PackingConfig, SftConfig
from bridle.trainer.learner.learner import Learner
from bridle.trainer.learner.sft_update import SftExample
from bridle.trainer.learner.trained import TrainedPolicy
from bridle.trainer.loop import GrpoLoop
from bridle.trainer.policy import model as model_module
from bridle.trainer.policy.exactness import exact_packing
from bridle.trainer.policy.model import (
    UnsupportedModel,
    load_policy,
    save_policy,
    score_pack,
    score_sequence,
    trainable_policy,
)
from bridle.trainer.sft.sft import train_sft
from support.forest import one_prompt


def a_pack():
    generator = np.random.default_rng(0)
    made = [
        SftExample(generator.integers(0, 64, 20).astype(np.uint32), np.arange(20) >= 5)
        for _ in range(3)
    ]
    (pack,) = make_packs(made, PackingConfig())
    return pack, made


def test_scores_equal_the_models_own_full_logits(policy):
    pack, made = a_pack()
    scores = score_pack(policy, pack)
    for number, sequence in enumerate(made):
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
        logits = policy(input_ids=ids[None]).logits[0]
        log_probabilities = logits.log_softmax(-1)
        here = torch.from_numpy(pack.samples == number)
        offsets = torch.from_numpy(pack.offsets)[here]
        expected = log_probabilities[offsets - 1, ids[offsets]]
        torch.testing.assert_close(scores.logprobs[here], expected, rtol=1e-5, atol=1e-5)
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)[offsets - 1]
        torch.testing.assert_close(scores.entropies[here], entropy, rtol=1e-5, atol=1e-5)


def test_logits_in_recomputed_chunks_give_the_same_scores_and_gradients(policy, monkeypatch):
    pack, _ = a_pack()
    results = []
    for elements in (1 << 25, 64 * 7):
        monkeypatch.setattr(model_module, "LOGIT_ELEMENTS", elements)
        policy.zero_grad()
        scores = score_pack(policy, pack)
        scores.logprobs.square().sum().backward()
        results.append((scores, [p.grad.clone() for p in policy.parameters()]))
    (whole, gradients), (chunked, chunked_gradients) = results
    torch.testing.assert_close(whole.logprobs, chunked.logprobs)
    torch.testing.assert_close(whole.entropies, chunked.entropies)
    torch.testing.assert_close(gradients, chunked_gradients, rtol=1e-4, atol=1e-5)


def test_no_logits_are_computed_where_nothing_is_predicted(policy):
    pack, _ = a_pack()
    rows = []
    handle = policy.lm_head.register_forward_hook(lambda _m, args, _o: rows.append(len(args[0])))
    score_pack(policy, pack)
    handle.remove()
    assert rows == [len(set(pack.sources.tolist()))]
    assert rows[0] < len(pack.token_ids)


def test_a_saved_policy_loads_with_the_same_weights_and_its_tokenizer(chat_directory, tmp_path):
    policy = load_policy(chat_directory)
    save_policy(policy, tmp_path, tokenizer_from=chat_directory)
    again = load_policy(tmp_path)
    torch.testing.assert_close(again.state_dict(), policy.state_dict(), rtol=0, atol=0)
    assert (tmp_path / "tokenizer.json").read_bytes() == (
        chat_directory / "tokenizer.json"
    ).read_bytes()
    assert (tmp_path / "chat_template.jinja").exists()


def test_a_saved_policy_keeps_the_template_for_tools(chat_directory, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(chat_directory, model)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    save_policy(load_policy(chat_directory), tmp_path / "saved", tokenizer_from=model)
    saved = tmp_path / "saved" / "additional_chat_templates" / "tool_use.jinja"
    assert saved.read_text() == "{{ tools }}"


def test_a_policy_generates_as_with_plain_attention(policy, policy_directory):
    plain = AutoModelForCausalLM.from_pretrained(policy_directory, attn_implementation="sdpa")
    prompts = torch.randint(3, 64, (2, 9))
    prompts[0, :3] = 0
    mask = torch.ones_like(prompts)
    mask[0, :3] = 0
    arguments = dict(attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert policy.generate(prompts, **arguments).tolist() == (
        plain.generate(prompts, **arguments).tolist()
    )


def test_settings_for_logits_that_the_model_does_not_follow_are_refused(tmp_path, policy):
    policy.config.final_logit_softcapping = 3.0
    save_policy(policy, tmp_path)
    with pytest.raises(UnsupportedModel, match="another family's"):
        load_policy(tmp_path)


@pytest.mark.parametrize(
    ("config_class", "settings"),
    [(GraniteConfig, {"logits_scaling": 4.0}), (CohereConfig, {"logit_scale": 0.25})],
)
def test_logits_are_scaled_as_their_family_does(config_class, settings, tmp_path):
    model = small_model(config_class, **settings)
    model.save_pretrained(tmp_path)
    policy = load_policy(tmp_path)
    assert exact_packing(policy, PackingConfig()).layout == "tree"
    pack, made = a_pack()
    scores = score_pack(policy, pack).logprobs
    for number, sequence in enumerate(made):
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
        own = model.eval()(input_ids=ids[None]).logits[0].log_softmax(-1)
        offsets = pack.offsets[pack.samples == number]
        expected = own[offsets - 1, ids[offsets]]
        found = scores[torch.from_numpy(pack.samples == number)]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_folder_without_weights_is_named(tmp_path, policy):
    policy.config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"no loadable causal LM in {tmp_path}: "):
        load_policy(tmp_path)


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", None])
def test_weights_that_were_not_fetched_whole_are_named(content, policy_directory, tmp_path, policy):
    save_policy(policy, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(content or path.read_bytes()[:-8])
    with pytest.raises(UnsupportedModel, match=f"no loadable causal LM in {tmp_path}: "):
        load_policy(tmp_path)


def test_a_sequences_scores_skip_its_first_token(policy):
    assert score_sequence(policy, np.asarray([1, 2, 3])).shape == (2,)


def small_model(config_class, **settings):
    """A random policy of two layers, loaded as the trainer loads it, whose layers do something."""
    config = config_class(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        **settings,
    )
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config)


CAPPED = {
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 3.0,
    "sliding_window": 8,
    "head_dim": 8,
}
WITH_SINKS = {
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "sliding_window": 8,
    "head_dim": 8,
}


@pytest.mark.parametrize(
    ("config_class", "settings"),
    [
        (Lfm2Config, {"layer_types": ["conv", "full_attention"]}),
    ],
)
def test_layers_that_mix_what_is_packed_together_are_trained_in_rows(
    config_class, settings, tmp_path, caplog
):
    model = small_model(config_class, **settings)
    model.save_pretrained(tmp_path)
    policy = load_policy(tmp_path)
    packing = exact_packing(policy, PackingConfig())
    assert packing.layout == "padded"
    assert "padded rows" in caplog.text
    made = one_prompt(10, 14, 3)
    for pack in make_packs(made, packing):
        scores = score_pack(policy, pack).logprobs.detach()
        for number in np.unique(pack.samples):
            here = pack.samples == number
            ids = torch.from_numpy(made[number].token_ids.astype(np.int64))
            own = model.eval()(input_ids=ids[None]).logits[0].log_softmax(-1)
            offsets = pack.offsets[here]
            expected = own[offsets - 1, ids[offsets]].detach()
            torch.testing.assert_close(scores[here], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("layout", ["tree", "flat"])
def test_layers_that_mix_are_known_in_bfloat16_too(tmp_path, layout, rank):
    """The mixed part may be no larger than the rounding of bfloat16."""
    model = small_model(Lfm2Config, layer_types=["conv", "full_attention"])
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "norm" not in name:
                each.normal_(0, 0.08)
    model.save_pretrained(tmp_path)
    compute = ComputeConfig(device="cpu", precision="bfloat16")
    policy = trainable_policy(tmp_path, compute, LoraConfig(rank=rank))
    assert exact_packing(policy, PackingConfig(layout=layout)).layout == "padded"


@pytest.mark.parametrize("layout", ["tree", "flat", "padded"])
def test_plain_attention_is_packed_as_asked(policy, layout, caplog):
    packing = PackingConfig(layout=layout, max_tokens=16)
    assert exact_packing(policy, packing) == packing
    assert not caplog.text


@pytest.mark.parametrize(
    ("config_class", "settings"), [(Gemma2Config, CAPPED), (GptOssConfig, WITH_SINKS)]
)
def test_soft_caps_and_sinks_have_the_gradients_of_the_model_itself(
    config_class, settings, tmp_path, monkeypatch
):
    monkeypatch.setattr(scored, "QUERIES", 7)
    model = small_model(config_class, **settings).eval()
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name.endswith("sinks"):
                each.normal_()
    model.save_pretrained(tmp_path)
    policy = load_policy(tmp_path)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 64, 40))
    own = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    own[:-1].gather(1, ids[1:, None]).sum().backward()
    score_sequence(policy, ids.numpy()).sum().backward()
    wanted = {name: each.grad for name, each in model.named_parameters()}
    for name, each in policy.named_parameters():
        largest = float(wanted[name].abs().max())
        torch.testing.assert_close(each.grad, wanted[name], rtol=0, atol=1e-5 * largest + 1e-8)
    assert any("sinks" in name for name in wanted) == (config_class is GptOssConfig)


def test_a_model_that_no_layout_computes_exactly_is_refused(tmp_path, monkeypatch):
    def refuse(*_):
        raise ValueError("no sinks here")

    monkeypatch.setattr(attention, "scored_attention", refuse)
    monkeypatch.setattr(blocks, "scored_attention", refuse)
    small_model(GptOssConfig, **WITH_SINKS).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"GptOssForCausalLM.*sinks"):
        exact_packing(load_policy(tmp_path), PackingConfig())


def test_both_kinds_of_training_ask_for_exact_packing(tmp_path):
    model = small_model(Lfm2Config, layer_types=["conv", "full_attention"])
    model.save_pretrained(tmp_path)
    policy = load_policy(tmp_path)
    learner = Learner(policy, GrpoConfig())
    loop = GrpoLoop(GrpoConfig(), [TrainedPolicy(learner, tmp_path)], lambda step, version: [])
    assert loop.config.packing.layout == "padded"
    ids = np.arange(24, dtype=np.uint32)
    examples = [SftExample((ids + 7 * n) % 64, ids >= 10) for n in range(2)]
    examples += [SftExample(example.token_ids[:17], example.mask[:17]) for example in examples]
    alone = [
        -score_sequence(policy, e.token_ids.astype(np.int64))[e.mask[1:]].detach() for e in examples
    ]
    (step,) = train_sft(Learner(policy, SftConfig()), examples, SftConfig())
    assert step.loss == pytest.approx(float(torch.cat(alone).mean()), rel=1e-3)

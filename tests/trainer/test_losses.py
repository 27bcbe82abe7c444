"""Losses against values computed by hand and against naive loops."""

import dataclasses
import math
import random

import pytest
import torch

from bridle.trainer.config import LossConfig
from bridle.trainer.losses.entropy import bonus_of, observe
from bridle.trainer.losses.importance import importance_weights
from bridle.trainer.losses.losses import (
    LOSSES,
    LossSums,
    clip,
    k3,
    needs_entropy_gradient,
    policy_loss,
)
from bridle.trainer.losses.terms import TokenTerms, differentiates_entropy
from bridle.trainer.policy.model import entropy


def terms(
    ratios,
    advantages,
    *,
    weights=None,
    behaviour_ratios=None,
    branches=None,
    reference=None,
    old=-1.0,
):
    """Tokens with π/π_old = ``ratios`` and π_old/μ = ``behaviour_ratios``."""
    size = len(ratios)
    old_logprobs = torch.full((size,), old, dtype=torch.float64)
    behaviour = old_logprobs - torch.tensor(behaviour_ratios or [1.0] * size).double().log()
    return TokenTerms(
        logprobs=(old_logprobs + torch.tensor(ratios).double().log()).requires_grad_(),
        old_logprobs=old_logprobs,
        behaviour_logprobs=behaviour,
        advantages=torch.tensor(advantages).double(),
        weights=torch.tensor(weights or [1.0] * size).double(),
        branches=torch.tensor(branches or [0] * size),
        reference_logprobs=None if reference is None else torch.tensor(reference).double(),
    )


def gradient(batch, config):
    loss, stats = policy_loss(batch, config)
    loss.backward()
    return loss.item(), batch.logprobs.grad.tolist(), stats


PLAIN = LossConfig(clip_low=0.2, clip_high=0.3, importance="none", trust_region="none")


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        # d/dlogπ of r A is r A where the clip does not bind, and 0 where it does.
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 2.0, -2.4, -2.4),
        (1.5, 2.0, -2.6, 0.0),  # good token already 30% likelier: bounded
        (0.5, 2.0, -1.0, -1.0),  # good token that became rarer: pulled back up
        (0.5, -2.0, 1.6, 0.0),  # bad token already 20% rarer: bounded
        (1.5, -2.0, 3.0, 3.0),  # bad token that became likelier: pushed down
    ],
)
def test_the_clipped_loss_equals_the_table(ratio, advantage, loss, slope):
    found, grads, stats = gradient(terms([ratio], [advantage]), PLAIN)
    assert found == pytest.approx(loss)
    assert grads[0] == pytest.approx(slope)
    assert stats["clipped"] == (1.0 if slope == 0 else 0.0)


def test_clip_higher_lets_rare_good_tokens_rise_further_than_bad_ones_fall():
    config = LossConfig(clip_low=0.1, clip_high=1.0, importance="none", trust_region="none")
    _, grads, _ = gradient(terms([1.9, 0.5], [1.0, -1.0]), config)
    assert grads == pytest.approx([-1.9, 0.0])


def test_gspo_uses_the_geometric_mean_ratio_of_each_branch():
    config = LossConfig(
        name="gspo", clip_low=0.3, clip_high=0.3, importance="none", trust_region="none"
    )
    ratios, branches, advantages = [1.1, 1.3, 0.4], [7, 7, 3], [1.0, 1.0, -1.0]
    loss, grads, stats = gradient(
        terms(ratios, advantages, branches=branches, weights=[0.5, 0.5, 1.0]), config
    )
    s = math.sqrt(1.1 * 1.3)
    # Branch 3 has s = 0.4 < 0.7 and a negative advantage, so it is bounded at 0.7 and has no slope.
    assert loss == pytest.approx(-s * 1.0 + 0.7)
    assert grads == pytest.approx([-s / 2, -s / 2, 0.0])
    assert stats["clipped"] == 1.0


def test_cispo_keeps_a_bounded_gradient_on_clipped_tokens():
    config = LossConfig(
        name="cispo", clip_low=0.2, clip_high=0.3, importance="none", trust_region="none"
    )
    loss, grads, stats = gradient(terms([1.5, 0.5, 1.1], [2.0, -1.0, 1.0]), config)
    logprobs = [-1 + math.log(r) for r in (1.5, 0.5, 1.1)]
    assert loss == pytest.approx(-1.3 * 2 * logprobs[0] + 0.5 * logprobs[1] - 1.1 * logprobs[2])
    assert grads == pytest.approx([-2.6, 0.5, -1.1])
    assert stats["clipped"] == 1.0, "there is no lower bound"


def test_importance_weights_correct_for_the_engine_and_are_capped():
    config = LossConfig(importance_cap=2.0, trust_region="none")
    _, grads, stats = gradient(
        terms([1.0] * 3, [1.0] * 3, behaviour_ratios=[0.5, 1.5, 9.0]), config
    )
    assert grads == pytest.approx([-0.5, -1.5, -2.0])
    assert stats.mean("importance") == pytest.approx((0.5 + 1.5 + 2.0) / 3)


def reference_weights(log_ratios, branches, config):
    """Each correction from its definition, a token at a time, in float64."""
    found = []
    for log_ratio, branch in zip(log_ratios, branches, strict=True):
        if config.importance == "sequence":
            own = [one for one, of in zip(log_ratios, branches, strict=True) if of == branch]
            log_ratio = math.fsum(own)
        ratio = math.exp(log_ratio)
        outside = not config.importance_floor <= ratio <= config.importance_cap
        if config.importance == "mask":
            found.append(0.0 if outside else ratio)
        else:
            found.append(min(ratio, config.importance_cap))
    return found if config.importance != "none" else [1.0] * len(found)


@pytest.mark.parametrize("importance", ["truncate", "mask", "sequence", "none"])
def test_each_correction_equals_its_definition(importance):
    config = LossConfig(importance=importance)
    torch.manual_seed(3)
    log_ratios = torch.randn(40, dtype=torch.float64)
    branches = torch.randint(0, 6, (40,))
    zeros = torch.zeros_like(log_ratios)
    batch = TokenTerms(zeros, log_ratios, zeros, zeros, zeros, branches)
    expected = reference_weights(log_ratios.tolist(), branches.tolist(), config)
    found = importance_weights(batch, config)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_masking_keeps_the_gradient_when_some_of_the_engines_logprobs_are_wrong():
    torch.manual_seed(0)
    count, vocabulary = 4000, 32
    logits = torch.randn(count, vocabulary, dtype=torch.float64)
    tokens = torch.distributions.Categorical(logits=logits).sample()
    advantages = torch.randn(count, dtype=torch.float64)
    wrong = torch.rand(count) < 0.01
    off = torch.where(wrong, 5.0 * (1 - 2 * torch.randint(0, 2, (count,))), torch.zeros(count))

    def found(importance, off):
        leaf = logits.clone().requires_grad_()
        logprobs = leaf.log_softmax(-1)[torch.arange(count), tokens]
        old = logprobs.detach()
        weights = torch.full((count,), 1 / count, dtype=torch.float64)
        of_one_branch = torch.zeros(count, dtype=torch.int64)
        batch = TokenTerms(logprobs, old, old + off, advantages, weights, of_one_branch)
        policy_loss(batch, LossConfig(importance=importance))[0].backward()
        return leaf.grad.flatten()

    true = found("none", torch.zeros(count))
    assert wrong.sum() > 20
    assert torch.nn.functional.cosine_similarity(true, found("mask", off), dim=0) >= 0.99


def test_importance_weights_carry_no_gradient():
    batch = terms([1.0, 1.0], [1.0, -1.0])
    learned = dataclasses.replace(batch, old_logprobs=batch.logprobs)
    assert not importance_weights(learned, LossConfig()).requires_grad


def test_the_corrected_kl_has_the_expectation_and_gradient_of_the_kl_itself():
    """A bandit of five arms in float64, whose expectation over the sampler is a sum."""
    generator = torch.Generator().manual_seed(0)
    sampler, policy, reference = (
        torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(3)
    )

    def penalty(corrected):
        logits = policy.clone().requires_grad_()
        logprobs = logits.log_softmax(0)
        batch = TokenTerms(
            logprobs=logprobs,
            old_logprobs=policy,
            behaviour_logprobs=sampler,
            advantages=torch.zeros(5).double(),
            weights=sampler.exp(),
            branches=torch.arange(5),
            reference_logprobs=reference,
        )
        config = LossConfig(importance_cap=1e9, kl_coefficient=1.0, kl_corrected=corrected)
        loss, _ = policy_loss(batch, config)
        loss.backward()
        return loss.item(), logits.grad

    logits = policy.clone().requires_grad_()
    exact = (logits.softmax(0) * (logits.log_softmax(0) - reference)).sum()
    exact.backward()
    value, slope = penalty(corrected=True)
    assert value == pytest.approx(exact.item(), abs=1e-12)
    torch.testing.assert_close(slope, logits.grad, rtol=0, atol=1e-12)
    plain, plain_slope = penalty(corrected=False)
    expected = (sampler.exp() * ((reference - policy).exp() - 1 - (reference - policy))).sum()
    assert plain == pytest.approx(expected.item(), abs=1e-12), "k3 under the sampler"
    assert (plain_slope - logits.grad).abs().max() > 1e-2, "which is not the KL's"


def test_the_kl_penalty_pulls_towards_the_reference():
    config = LossConfig(importance="none", kl_coefficient=0.5)
    loss, grads, stats = gradient(terms([1.0], [0.0], reference=[-0.4]), config)
    expected = math.exp(0.6) - 1 - 0.6
    assert loss == pytest.approx(0.5 * expected)
    assert grads[0] == pytest.approx(0.5 * (1 - math.exp(0.6)))
    assert stats["kl_reference"] == pytest.approx(expected)


def test_k3_is_unbiased_for_the_divergence():
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    assert (p * k3(p.log(), q.log())).sum().item() == pytest.approx(exact.item())


def test_the_batch_loss_is_the_weighted_sum_over_tokens():
    weights = [0.1, 0.2, 0.3]
    loss, grads, _ = gradient(terms([1.0] * 3, [1.0, -2.0, 3.0], weights=weights), PLAIN)
    assert loss == pytest.approx(-0.1 + 0.4 - 0.9)
    assert grads == pytest.approx([-0.1, 0.4, -0.9])


def test_at_ratio_one_every_loss_has_the_policy_gradient():
    for name in ("clip", "gspo", "cispo"):
        # GSPO spreads a branch's weight evenly, so the branch's weights are even here too.
        _, grads, _ = gradient(
            terms([1.0] * 3, [2.0, 2.0, -1.0], branches=[0, 0, 1], weights=[0.25, 0.25, 0.5]),
            LossConfig(name=name),
        )
        assert grads == pytest.approx([-0.5, -0.5, 0.5]), name


def test_stats_of_packs_add_up_to_those_of_the_batch():
    whole = terms([1.5, 0.5, 1.1, 0.9], [1.0, -1.0, 1.0, -1.0])
    parts = [terms([1.5, 0.5], [1.0, -1.0]), terms([1.1, 0.9], [1.0, -1.0])]
    _, expected = policy_loss(whole, PLAIN)
    summed = sum((policy_loss(part, PLAIN)[1] for part in parts), LossSums())
    assert summed == pytest.approx(dict(expected))
    assert {"tokens", "loss", "clipped", "ratio", "kl_old", "importance"} < summed.keys()


def test_a_loss_adds_numbers_of_its_own_to_the_metrics():
    @LOSSES.registered("counted")
    def counted(terms, config):
        found = clip(terms, config)
        return dataclasses.replace(found, metrics={"good": (terms.advantages > 0).double()})

    try:
        batch = terms([1.0] * 4, [1.0, -1.0, 1.0, 1.0])
        _, sums = policy_loss(batch, LossConfig(name="counted"))
    finally:
        del LOSSES._parts["counted"]
    assert sums.mean("good") == 0.75
    assert policy_loss(batch, LossConfig())[1].mean("good") == 0.0


def test_aepo_is_the_papers_loss_computed_token_by_token():
    generator = torch.Generator().manual_seed(0)
    size, weight = 24, 0.3
    old = -3 * torch.rand(size, dtype=torch.float64, generator=generator)
    logprobs = (old + 0.5 * torch.randn(size, dtype=torch.float64, generator=generator)).detach()
    advantages = torch.randn(size, dtype=torch.float64, generator=generator)
    entropies = torch.rand(size, dtype=torch.float64, generator=generator)
    branches = torch.arange(size) % 3
    given = TokenTerms(
        logprobs=logprobs.clone().requires_grad_(),
        old_logprobs=old,
        behaviour_logprobs=old,
        advantages=advantages,
        weights=torch.ones(size, dtype=torch.float64),
        branches=branches,
        entropies=entropies,
    )
    config = dataclasses.replace(PLAIN, name="aepo", options={"aepo": {"entropy_weight": weight}})
    loss, slopes, _ = gradient(given, config)
    total = 0.0
    for token in range(size):
        own = [float(entropies[other]) for other in range(size) if other % 3 == token % 3]
        mean = sum(own) / len(own)
        deviation = math.sqrt(sum((each - mean) ** 2 for each in own) / len(own))
        normalized = (float(entropies[token]) - mean) / (deviation + 1e-6)
        advantage = float(advantages[token]) * (1 + weight * normalized)
        ratio = math.exp(float(logprobs[token] - old[token]))
        total -= min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
        factor = ratio
        if ratio > 1.3 and advantage > 0:
            factor = 1.3
        elif ratio < 0.8 and advantage < 0:
            factor = 0.0
        assert slopes[token] == pytest.approx(-factor * advantage, abs=1e-9)
    assert loss == pytest.approx(total, abs=1e-9)
    with pytest.raises(ValueError, match="entropy"):
        policy_loss(dataclasses.replace(given, entropies=None), config)


def test_epo_adds_entropy_and_a_corridor_around_the_sampler_s():
    rng = random.Random(0)
    size, options = 24, {"bonus": 0.3, "smoothing": 0.5, "penalty": 2.0, "low": 0.8, "high": 1.1}
    old = [-2 * rng.random() for _ in range(size)]
    behaviour = [one + 0.2 * rng.gauss(0, 1) - 0.2 for one in old]
    given = [2 * rng.random() for _ in range(size)]
    entropies = torch.tensor(given, dtype=torch.float64, requires_grad=True)
    batch = dataclasses.replace(
        terms([1.1] * size, [rng.gauss(0, 1) for _ in old], branches=[t % 3 for t in range(size)]),
        behaviour_logprobs=torch.tensor(behaviour, dtype=torch.float64),
        entropies=entropies,
    )
    config = dataclasses.replace(PLAIN, name="epo", options={"epo": options})
    assert needs_entropy_gradient(config)
    loss, slopes, stats = gradient(batch, config)
    plain, plain_slopes, _ = gradient(
        dataclasses.replace(batch, logprobs=batch.logprobs.detach().requires_grad_()), PLAIN
    )
    assert slopes == pytest.approx(plain_slopes, abs=1e-12)
    expected, outside = plain, 0.0
    assert entropies.grad is not None
    for token in range(size):
        own = [-behaviour[other] for other in range(size) if other % 3 == token % 3]
        history = math.fsum(own) / len(own)
        low, high = 0.8 * history, 1.1 * history
        below, above = max(low - given[token], 0.0), max(given[token] - high, 0.0)
        expected -= 0.3 * (given[token] - 0.5 * 2.0 * (below + above))
        outside += below + above
        side = (below > 0) - (above > 0)
        assert float(entropies.grad[token]) == pytest.approx(-0.3 * (1 + side), abs=1e-12)
    assert loss == pytest.approx(expected, abs=1e-9)
    assert stats["corridor"] == pytest.approx(outside, abs=1e-9)
    with pytest.raises(ValueError, match="entropy"):
        policy_loss(dataclasses.replace(batch, entropies=None), config)


def test_a_loss_gets_the_gradient_of_entropies_only_if_it_is_marked():
    @differentiates_entropy
    def bonus(terms, config):
        return dataclasses.replace(clip(terms, config), loss=-terms.entropies)

    LOSSES.register("entropy_bonus", bonus)
    assert needs_entropy_gradient(LossConfig(name="entropy_bonus"))
    assert not needs_entropy_gradient(LossConfig())
    logits = torch.tensor([[0.5, -1.0, 2.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    found = entropy(logits.log_softmax(-1))
    found.sum().backward()
    p = logits.detach().softmax(-1)[0]
    expected = [
        0.0 if float(one) == 0 else -float(one) * (math.log(float(one)) + float(found[0].detach()))
        for one in p
    ]
    assert logits.grad[0].tolist() == pytest.approx(expected, abs=1e-12)


def test_an_entropy_bonus_has_the_gradient_of_its_definition():
    """Compare the gradient in float32 with central differences of the definition in float64."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 6, generator=generator).requires_grad_()
    bonus, weights = 0.3, torch.tensor([0.5, 0.3, 0.2])

    def scored(logits):
        spread = logits.log_softmax(-1)
        logprobs = spread[:, 0]
        return TokenTerms(
            logprobs=logprobs,
            old_logprobs=logprobs.detach(),
            behaviour_logprobs=logprobs.detach(),
            advantages=torch.zeros(3).to(logits),
            weights=weights.to(logits),
            branches=torch.zeros(3, dtype=torch.int64),
            entropies=-(spread.exp() * spread).sum(-1),
        )

    loss, _ = policy_loss(scored(logits), PLAIN, bonus)
    loss.backward()
    exact = logits.detach().double()

    def defined(logits):
        p = torch.softmax(logits, -1)
        return float(-bonus * (weights.double() * -(p * p.log()).sum(-1)).sum())

    for row, column in ((0, 0), (1, 3), (2, 5)):
        up, down = exact.clone(), exact.clone()
        up[row, column] += 1e-6
        down[row, column] -= 1e-6
        slope = (defined(up) - defined(down)) / 2e-6
        assert logits.grad[row, column].item() == pytest.approx(slope, rel=1e-4, abs=1e-7)
    none, _ = policy_loss(scored(exact), PLAIN)
    assert none.item() == 0.0


def test_the_bonus_grows_below_the_floor_and_is_off_above_it():
    config, memory = LossConfig(entropy_floor=0.5, entropy_step=0.1), {}
    found = [bonus_of(memory, config)]
    for measured in (0.4, 0.3, 0.6, 0.4, 0.7, 0.7, 0.7):
        observe(memory, measured, config)
        found.append(bonus_of(memory, config))
    assert found == pytest.approx([0.0, 0.1, 0.2, 0.0, 0.2, 0.0, 0.0, 0.0])
    observe(memory, 0.4, config)
    assert bonus_of(memory, config) == pytest.approx(0.1), "it never falls below 0"
    unused = {}
    observe(unused, 0.0, LossConfig())
    assert (unused, bonus_of(unused, LossConfig())) == ({}, 0.0)

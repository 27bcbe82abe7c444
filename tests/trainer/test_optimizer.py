import pytest
import torch

from bridle.trainer.config import OptimizerConfig
from bridle.trainer.learner.optimizer import (
    clip_and_step,
    learning_rate,
    make_optimizer,
    set_learning_rate,
)


def test_the_rate_warms_up_and_then_follows_its_schedule():
    config = OptimizerConfig(
        learning_rate=1.0, warmup_steps=3, schedule="cosine", final_fraction=0.2
    )
    rates = [learning_rate(step, 11, config) for step in range(11)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.2)
    constant = OptimizerConfig(learning_rate=1.0, warmup_steps=1)
    assert [learning_rate(step, 3, constant) for step in range(3)] == [0.5, 1.0, 1.0]


def a_layer(gradient):
    layer = torch.nn.Linear(2, 1, bias=False)
    layer.weight.grad = torch.tensor([gradient])
    return layer


def test_long_gradients_are_scaled_to_the_clip():
    layer = a_layer([3.0, 4.0])
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.weight.detach().clone()
    norm, stepped = clip_and_step(layer, optimizer, 0.5)
    assert norm == pytest.approx(5.0)
    assert stepped
    torch.testing.assert_close(before - layer.weight.detach(), torch.tensor([[0.3, 0.4]]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(bad):
    layer = a_layer([1.0, bad])
    before = layer.weight.detach().clone()
    _, stepped = clip_and_step(layer, make_optimizer(layer, OptimizerConfig()), 1.0)
    assert not stepped
    assert torch.equal(layer.weight, before)
    assert layer.weight.grad is None


def test_a_rate_of_zero_changes_no_bit_even_with_weight_decay():
    layer = a_layer([0.3, -2.0])
    optimizer = make_optimizer(layer, OptimizerConfig(weight_decay=0.1))
    set_learning_rate(optimizer, 0.0)
    before = layer.weight.detach().clone()
    clip_and_step(layer, optimizer, 1.0)
    assert torch.equal(layer.weight, before)

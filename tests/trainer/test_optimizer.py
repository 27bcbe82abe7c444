import dataclasses
import json

import pytest
import torch

from bridle.registry import UnknownPart
from bridle.run.training import require_parts
from bridle.trainer.config import (
    GrpoConfig,
    LoraConfig,
    OptimizerConfig,
    SftConfig,
)
from bridle.trainer.learner.gradients import kind_of_layer
from bridle.trainer.learner.optimizer import (
    UnsupportedOptimizer,
    clip_and_step,
    learning_rate,
    make_optimizer,
    set_learning_rate,
)
from bridle.trainer.learner.rates import rate_line, rate_warning, resolved
from bridle.trainer.learner.several import Several
from bridle.trainer.policy.model import load_policy
from bridle.trainer.policy.sharding import Share
from bridle.user_code import UserCodeError

CONFIG = OptimizerConfig(learning_rate=1e-3)


def test_the_rate_warms_up_and_then_follows_its_schedule():
    config = OptimizerConfig(
        learning_rate=1.0, warmup_steps=3, schedule="cosine", final_fraction=0.2
    )
    rates = [learning_rate(step, 12, config) for step in range(12)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.2)
    constant = OptimizerConfig(learning_rate=1.0)
    assert [learning_rate(step, 60, constant) for step in range(6)] == pytest.approx(
        [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0]
    )


def test_a_short_run_warms_up_for_a_quarter_of_its_steps_at_most():
    config = OptimizerConfig(learning_rate=1.0)
    for total in (1, 2, 3):
        assert [learning_rate(step, total, config) for step in range(total)] == [1.0] * total
    assert [learning_rate(step, 8, config) for step in range(3)] == pytest.approx([1 / 3, 2 / 3, 1])


@pytest.mark.parametrize(
    ("config", "rate"),
    [
        (GrpoConfig(), 1e-6),
        (GrpoConfig(lora=LoraConfig(rank=8)), 1e-5),
        (GrpoConfig(lora=LoraConfig(rank=8, alpha=16)), 2e-5),
        (SftConfig(), 1e-5),
        (SftConfig(lora=LoraConfig(rank=8)), 1e-4),
        (SftConfig(optimizer=OptimizerConfig(learning_rate=0.5)), 0.5),
    ],
)
def test_an_automatic_rate_depends_on_what_is_trained(config, rate):
    assert resolved(config).optimizer.peak == pytest.approx(rate)
    assert f"learning rate {rate:.3g}" in rate_line(config)


def test_a_rate_that_nobody_resolved_makes_no_optimizer():
    with pytest.raises(ValueError, match="the learning rate is auto"):
        make_optimizer(a_layer([1.0, 1.0]), OptimizerConfig())


def test_a_rate_far_from_the_usual_is_warned_of_except_for_tiny_policies(tmp_path):
    def warning(rate, hidden=2048, rank=0):
        (tmp_path / "config.json").write_text(json.dumps({"hidden_size": hidden}))
        optimizer = OptimizerConfig(learning_rate=rate)
        return rate_warning(GrpoConfig(optimizer=optimizer, lora=LoraConfig(rank=rank)), tmp_path)

    low = "1e-06 is below the usual 1e-05 of adapters of alpha 32 by a factor of 10, and will hard"
    assert low in (warning(1e-6, rank=8) or "")
    assert "above the usual 1e-06 of all weights by a factor of 1000" in (warning(1e-3) or "")
    assert [warning(rate) for rate in (0.0, 2e-5, "auto")] == [None] * 3
    assert warning(1e-3, hidden=64) is None


def a_layer(gradient):
    layer = torch.nn.Linear(2, 1, bias=False)
    layer.weight.grad = torch.tensor([gradient])
    return layer


def test_long_gradients_are_scaled_to_the_clip():
    layer = a_layer([3.0, 4.0])
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.weight.detach().clone()
    step = clip_and_step(layer, optimizer, 0.5)
    assert step.norm == pytest.approx(5.0)
    assert step.taken
    torch.testing.assert_close(before - layer.weight.detach(), torch.tensor([[0.3, 0.4]]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(bad):
    layer = a_layer([1.0, bad])
    before = layer.weight.detach().clone()
    assert not clip_and_step(layer, make_optimizer(layer, CONFIG), 1.0).taken
    assert torch.equal(layer.weight, before)
    assert layer.weight.grad is None


def test_gradients_are_measured_by_kinds_of_layers(policy_directory):
    model = load_policy(policy_directory)
    norms = {
        "model.embed_tokens": 3.0,
        "model.layers.0.self_attn.q_proj": 4.0,
        "model.layers.1.mlp.up_proj": 12.0,
        "model.norm": 84.0,
    }
    for name, norm in norms.items():
        weight = model.get_parameter(f"{name}.weight")
        weight.grad = torch.full_like(weight, norm / weight.numel() ** 0.5)
    step = clip_and_step(model, make_optimizer(model, CONFIG), 1e9)
    expected = {"embeddings": 3.0, "attention": 4.0, "mlp": 12.0, "norms": 84.0}
    assert step.by_kind == pytest.approx(expected, rel=1e-5)
    assert step.norm == pytest.approx(85.0, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.3.self_attn.q_norm.weight", "norms"),
        ("model.layers.3.self_attn.q_proj.lora_A.default.weight", "attention"),
        ("model.layers.3.mlp.experts.gate_up_proj", "mlp"),
        ("transformer.h.0.ln_1.weight", "norms"),
        ("transformer.wte.weight", "embeddings"),
        ("lm_head.weight", "head"),
        ("something.weight", "others"),
    ],
)
def test_a_layer_has_its_kind_by_its_name(name, kind):
    assert kind_of_layer(name) == kind


def test_a_rate_of_zero_changes_no_bit_even_with_weight_decay():
    layer = a_layer([0.3, -2.0])
    optimizer = make_optimizer(layer, dataclasses.replace(CONFIG, weight_decay=0.1))
    set_learning_rate(optimizer, 0.0)
    before = layer.weight.detach().clone()
    clip_and_step(layer, optimizer, 1.0)
    assert torch.equal(layer.weight, before)


def test_it_is_adamw_with_the_settings_unless_another_is_named():
    config = OptimizerConfig(learning_rate=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    optimizer = make_optimizer(a_layer([1.0, 1.0]), config)
    assert type(optimizer) is torch.optim.AdamW
    (group,) = optimizer.param_groups
    found = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    assert found == {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}


def test_a_class_is_named_by_its_module_and_a_function_by_its_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def sgd(parameters, *, lr, betas, weight_decay, **_others):\n"
        "    return torch.optim.SGD(parameters, lr, betas[0], weight_decay=weight_decay)\n"
    )
    layer = a_layer([1.0, 2.0])
    layer.bias = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    assert type(made(layer, "torch.optim:NAdam")) is torch.optim.NAdam
    optimizer = made(layer, f"{file}:sgd")
    assert type(optimizer) is torch.optim.SGD
    (group,) = optimizer.param_groups
    assert [each is layer.weight for each in group["params"]] == [True]
    before = layer.weight.detach().clone()
    set_learning_rate(optimizer, 0.1)
    clip_and_step(layer, optimizer, 1e9)
    torch.testing.assert_close(before - layer.weight.detach(), torch.tensor([[0.1, 0.2]]))


def made(layer, name):
    return make_optimizer(layer, dataclasses.replace(CONFIG, name=name))


def test_a_rate_that_is_a_tensor_is_set_in_place():
    """torchao's optimizers refuse to step with another object than the one they made."""
    optimizer = torch.optim.AdamW(a_layer([1.0, 1.0]).parameters(), lr=torch.tensor(1.0))
    rate = optimizer.param_groups[0]["lr"]
    set_learning_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25


def test_an_optimizer_that_is_not_there_or_refuses_its_keywords_is_an_error_with_the_remedy(
    tmp_path,
):
    layer = a_layer([1.0, 1.0])
    with pytest.raises(UnknownPart, match=r"no optimizer 'adam': name FILE\.py:NAME or .*adamw"):
        made(layer, "adam")
    with pytest.raises(UserCodeError, match=r"torch\.optim has no 'Adam8'"):
        made(layer, "torch.optim:Adam8")
    with pytest.raises(UnsupportedOptimizer, match=r"unexpected keyword.*as FILE\.py:NAME"):
        made(layer, "torch.optim:Adafactor")
    file = tmp_path / "faulty.py"
    file.write_text(
        "def faulty(parameters, **options):\n"
        "    return options['rate']\n"
        "def nothing(parameters, **options): ...\n"
    )
    with pytest.raises(UnsupportedOptimizer, match=r"KeyError: 'rate' \(.*faulty\.py, line 2\)"):
        made(layer, f"{file}:faulty")
    with pytest.raises(UnsupportedOptimizer, match=r"nothing is a NoneType: .*returns a torch"):
        made(layer, f"{file}:nothing")
    with pytest.raises(UnknownPart, match="no optimizer 'adam'"):
        require_parts(GrpoConfig(optimizer=OptimizerConfig(name="adam")))


def test_several_devices_train_with_optimizers_whose_state_is_shaped_as_the_parameters(tmp_path):
    layer = a_layer([1.0, 1.0])
    layer.bridle_share = Share(0, 2)
    assert type(made(layer, "torch.optim:NAdam")) is torch.optim.NAdam
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def adafactor(parameters, *, lr, **_others):\n"
        "    return torch.optim.Adafactor(parameters, lr=lr)\n"
    )
    with pytest.raises(UnsupportedOptimizer, match="in one process, since it is a Adafactor: on"):
        made(layer, f"{file}:adafactor")


GROUPED = """
import torch
from bridle.trainer.learner.several import Several

def grouped(named_parameters, *, lr, **_others):
    named = dict(named_parameters)
    slow = {"params": [named["1.weight"]], "lr": lr / 10}
    return torch.optim.SGD([{"params": [named["0.weight"], named["0.bias"]]}, slow], lr=lr)

def twice(named_parameters, *, lr, **_others):
    parts = (torch.optim.SGD([each for _, each in named_parameters], lr=lr) for _ in range(2))
    return Several(*parts)
"""


def test_a_factory_that_asks_for_names_gets_them_and_its_groups_keep_their_rates(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(GROUPED)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1, bias=False))
    optimizer = made(model, f"{file}:grouped")
    set_learning_rate(optimizer, 0.5)
    fast, slow = optimizer.param_groups
    assert fast["params"] == [model[0].weight, model[0].bias]
    assert slow["params"] == [model[1].weight]
    assert (fast["lr"], slow["lr"]) == (0.5, pytest.approx(0.05))
    with pytest.raises(UnsupportedOptimizer, match="a parameter belongs to two optimizers"):
        made(model, f"{file}:twice")


def test_several_optimizers_refuse_a_state_of_other_groups_and_a_closure():
    layer = torch.nn.Linear(2, 1)
    one, other = (torch.optim.SGD([each], lr=1.0) for each in layer.parameters())
    several = Several(one, other)
    with pytest.raises(ValueError, match="it has 1 groups, and 2 are here"):
        several.load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="no closure"):
        several.step(lambda: 0.0)

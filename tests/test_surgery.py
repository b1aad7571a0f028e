"""Parts of a model are replaced by path, under the same parameter names, and put back."""

from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.errors import OptimizationError
from fasttrain.surgery import Surgery, find_sites, replace


class Net(nn.Module):
    """A plain part, a part used twice, and one with a frozen normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
        self.first = nn.Linear(3, 3, bias=False)
        self.second = self.first
        self.block = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.second(self.first(self.body(x))))


class Louder(nn.Linear):
    """Another module with the same parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def louder(old: nn.Module) -> Louder:
    assert isinstance(old, nn.Linear)
    new = Louder(old.in_features, old.out_features, bias=old.bias is not None)
    new.load_state_dict(old.state_dict())
    return new


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def test_find_sites_gives_a_shared_module_under_each_path() -> None:
    assert [site.path for site in find_sites(Net(), is_linear)] == ["body.0", "body.2", "first", "second", "block.1"]
    assert list(find_sites(nn.Linear(1, 1), is_linear)) == [], "the model itself can't be replaced in itself"


def test_replace_keeps_names_order_and_modes() -> None:
    net = Net().train()
    net.block[0].eval()
    names = list(net.state_dict())
    old = net.block
    fresh = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    assert replace(net, "block", fresh) is old
    assert list(net.state_dict()) == names
    assert fresh.training
    assert not fresh[0].training, "a normalization that is frozen by eval() stays so"
    assert fresh[1].training
    replace(net, "body.0", louder(net.body[0]))
    assert [type(part) for part in net.body] == [Louder, nn.ReLU, nn.Linear]


@pytest.mark.parametrize("path", ["nope", "body.7", "body.0.weight.x", ""])
def test_nothing_there(path: str) -> None:
    with pytest.raises(OptimizationError) as caught:
        replace(Net(), path, nn.Linear(3, 3))
    assert str(caught.value) == f"there is no module at '{path}' in Net."


@pytest.mark.parametrize(
    ("new", "what"),
    [
        (nn.Linear(3, 3, bias=False), "'bias' of shape (3,) is in one and not in the other."),
        (nn.Linear(3, 4), "of shape "),
        (nn.Sequential(nn.Linear(3, 3)), "of shape "),
    ],
)
def test_another_state_dict_is_refused_and_nothing_changes(new: nn.Module, what: str) -> None:
    net = Net()
    before = net.body[0]
    with pytest.raises(OptimizationError) as caught:
        replace(net, "body.0", new)
    assert str(caught.value).startswith(
        f"replacing 'body.0' (Linear) by {type(new).__name__} would change the checkpoint: "
    )
    assert what in str(caught.value)
    assert net.body[0] is before


def test_extra_state_that_is_no_tensor() -> None:
    class WithExtra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": 1.0}

        def set_extra_state(self, state: Any) -> None:
            pass

    net = nn.Sequential(WithExtra(3, 3))
    replace(net, "0", WithExtra(3, 3))


def test_surgery_shares_what_was_shared_and_can_be_undone() -> None:
    net, x = Net().eval(), torch.randn(5, 3)
    plain = net(x)
    names, parts = list(net.state_dict()), dict(net.named_modules())
    surgery = Surgery(net)
    assert surgery.apply(is_linear, louder) == ["body.0", "body.2", "first", "second", "block.1"]
    assert net.first is net.second
    assert isinstance(net.first, Louder)
    assert not torch.allclose(net(x), plain)
    assert list(net.state_dict()) == names
    with torch.no_grad():
        net.first.weight.mul_(3)
    trained = {name: value.clone() for name, value in net.state_dict().items()}
    surgery.undo()
    assert dict(net.named_modules()) == parts, "the very same modules"
    for name, value in net.state_dict().items():
        assert torch.equal(value, trained[name]), "what was trained meanwhile stays"
    assert surgery.replaced == {}
    surgery.undo()


def test_undo_of_nested_replacements() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    inner, linear = net[0], net[0][0]

    def remake(old: nn.Module) -> nn.Module:
        return louder(old) if isinstance(old, nn.Linear) else nn.Sequential(nn.Linear(2, 2))

    surgery = Surgery(net)
    surgery.apply(lambda module: isinstance(module, (nn.Sequential, nn.Linear)), remake)
    surgery.undo()
    assert net[0] is inner
    assert net[0][0] is linear


def test_applied_twice_the_first_original_comes_back() -> None:
    net = Net()
    original = net.first
    surgery = Surgery(net)
    surgery.apply(is_linear, louder)
    surgery.apply(lambda module: isinstance(module, Louder), louder)
    surgery.undo()
    assert net.first is original

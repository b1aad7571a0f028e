"""Places of findings: the line, who called it, and the words for each kind."""

import inspect
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from marked_lines import line_of
from torchvision.models.detection import retinanet

from fasttrain.callbacks.cuda_graph_step.sync_finder.cures import KINDS
from fasttrain.callbacks.cuda_graph_step.sync_finder.line_trace import lines_that_change
from fasttrain.callbacks.cuda_graph_step.sync_finder.places import Place, is_machinery, short_path, site_of


def test_the_line_of_an_assignment_whose_value_a_function_made() -> None:
    held: dict[str, Any] = {"value": None, "other": 0}

    def made() -> list[int]:
        return [1]

    def step() -> None:
        held["value"] = made()  # value
        held["other"] += 1  # other
        held["other"] += 1

    found = lines_that_change(step, {"value": lambda: held["value"], "other": lambda: held["other"], "no": lambda: 0})
    assert {name: site.where for name, site in found.items()} == {
        "value": Place(__file__, line_of(step, "value")),
        "other": Place(__file__, line_of(step, "other")),
    }


def test_where_and_who_called_it() -> None:
    mine, library = Place("/home/me/model.py", 3), Place("/x/site-packages/timm/loss.py", 7)
    inside, generated = Place(torch.nn.modules.module.__file__, 1), Place("<frozen runpy>", 1)
    site = site_of([inside, library, generated, mine])
    assert site is not None
    assert (site.where, site.user_where) == (library, mine)
    site = site_of([inside, mine, library])
    assert site is not None
    assert (site.where, site.user_where) == (mine, None)
    assert site_of([inside, generated]) is None
    assert is_machinery(pl.__file__)
    assert is_machinery(inspect.__file__)
    assert not is_machinery(retinanet.__file__)
    assert str(library) == "timm/loss.py:7"
    assert short_path(str(retinanet.__file__)) == "torchvision/models/detection/retinanet.py"
    assert short_path("/home/me/model.py") == "/home/me/model.py"


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_has_its_words(name: str) -> None:
    kind = KINDS[name]
    for text in (kind.what, kind.cure):
        assert text == text.strip()
        assert not text.endswith(".")
        assert "\n" not in text
    assert not (kind.breaks and kind.freezes)

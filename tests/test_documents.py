"""What the documents say works: links lead somewhere, blocks run, commands name keys that exist."""

import re
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fasttrain.callbacks import CATALOGUE
from fasttrain.config import RunConfig
from fasttrain.plan import requested
from fasttrain.recipe import find_recipe, recipe_names, resolve

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(p for p in [*ROOT.glob("*.md"), *ROOT.glob("callbacks/*/*.md"), *ROOT.glob("recipes/*/*.md")])


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", document.read_text())
    missing = [t for t in targets if not t.startswith("http") and not (document.parent / t).exists()]
    assert not missing


def test_every_room_and_recipe_has_its_page() -> None:
    pages = [ROOT / "callbacks" / name / "README.md" for name in CATALOGUE]
    pages += [ROOT / "recipes" / name / "README.md" for name in recipe_names()]
    assert [page for page in pages if not page.is_file()] == []


def test_readmes_python_block_runs() -> None:
    code = blocks(ROOT / "README.md", "python")
    assert len(code) == 1
    exec(compile(code[0], "README.md", "exec"), {})


def test_readmes_yaml_block_has_keys_that_exist() -> None:
    (text,) = blocks(ROOT / "README.md", "yaml")
    values = OmegaConf.create(text)
    merged = OmegaConf.merge(OmegaConf.structured(RunConfig), values)
    wanted, off = requested(merged.optimizations, CATALOGUE)
    assert [o.name for o in wanted] == ["channels_last", "precision", "cuda_graph_step"]
    assert off == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_name_recipes_and_keys_that_exist(document: Path) -> None:
    text = document.read_text().replace("\\\n", " ")
    for line in re.findall(r"^(?:.*&& )?fasttrain (?:fit|explain) (.*)$", text, re.MULTILINE):
        words = [word for word in shlex.split(line, comments=True) if not word.startswith("-")]
        overrides = [word for word in words if "=" in word]
        recipes = [word for word in words if "=" not in word]
        if recipes and not recipes[0].startswith("runs/"):
            assert resolve(find_recipe(recipes[0]), overrides).config.recipe == Path(recipes[0]).stem


def test_fields_of_every_yaml_fragment_resolve() -> None:
    for fragment in (ROOT / "configs" / "optimizations").glob("*.yaml"):
        resolved = resolve(find_recipe("retinanet"), [f"optimizations={fragment.stem}"])
        wanted, _ = requested(resolved.config.optimizations, CATALOGUE)
        assert {o.name for o in wanted} == set(OmegaConf.load(fragment).optimizations)

"""Who may import whom, and that an import does nothing but import."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fasttrain

PACKAGE = Path(fasttrain.__file__).parent
ROOT = PACKAGE.parent
CORE = sorted([*PACKAGE.glob("*.py"), *(PACKAGE / "mlperf").glob("*.py")])
LEAVES = sorted([*(PACKAGE / "callbacks").rglob("*.py"), *(PACKAGE / "recipes").rglob("*.py")])


def dotted(path: Path) -> str:
    """Return a file's module name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[str]:
    """Yield the name of everything a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where a name comes from"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# Folders that several rooms are built on, and that are no optimization by themselves.
PARTS = {f"callbacks.{path.name}" for path in (PACKAGE / "callbacks").iterdir()
         if (path / "__init__.py").is_file() and not (path / "optimization.py").is_file()}  # fmt: skip
# And the same for recipes: a folder without a YAML file beside it.
PARTS |= {f"recipes.{path.name}" for path in (PACKAGE / "recipes").iterdir()
          if (path / "__init__.py").is_file() and not path.with_suffix(".yaml").is_file()}  # fmt: skip

# A captured evaluation is a captured function: the same warm-up, check and way back to eager calls.
# FP8 products of a feed-forward block are those of gemm_gelu's places, with its GELU.
BUILT_ON = {
    "callbacks.fp8_linear": {"callbacks.gemm_gelu"},
    "callbacks.graph_evaluation": {"callbacks.cuda_graph_step"},
}


def room_of(module: str) -> str | None:
    """Return `callbacks.NAME` or `recipes.NAME` for a module in a room."""
    parts = module.split(".")
    return ".".join(parts[1:3]) if len(parts) > 2 and parts[1] in ("callbacks", "recipes") else None


@pytest.mark.parametrize("path", [path for path in CORE if not path.stem.startswith("cli")], ids=lambda path: path.stem)
def test_the_core_imports_no_room_and_no_recipe(path: Path) -> None:
    leaves = [name for name in imported(path) if name.startswith(("fasttrain.callbacks", "fasttrain.recipes"))]
    assert leaves == []


@pytest.mark.parametrize("path", LEAVES, ids=dotted)
def test_a_room_imports_no_other_room(path: Path) -> None:
    own = room_of(dotted(path))
    if own is None or path.name.startswith("bench"):  # the catalogue; a bench compares with whatever there is
        return
    others = {room for name in imported(path) if (room := room_of(name)) is not None and room != own}
    if own.startswith("recipes."):  # a recipe is a user: what the first page of a room or its package names is for it
        pages = {room for room in others if room.startswith("callbacks.")}
        inner = {name for name in imported(path) if room_of(name) in pages and name.count(".") > 3}
        assert inner == set(), "a recipe takes from a room what its package names"
        others -= pages
    allowed = PARTS | BUILT_ON.get(own, set()) if own not in PARTS else set()
    assert others <= allowed, "a room builds on parts alone, and a part on no room"
    if own.startswith("callbacks."):
        for above in ("cli", "fit", "run", "plan", "recipe"):
            assert not any(name.startswith(f"fasttrain.{above}.") for name in imported(path)), "a room stands alone"


def test_no_file_imports_the_folders_by_their_bare_names() -> None:
    folders = [PACKAGE, ROOT / "callbacks", ROOT / "recipes", ROOT / "tests", ROOT / "benchmarks"]
    files = {file.resolve() for folder in folders for file in folder.rglob("*.py")}
    assert len(files) > 20
    bare = [(file, name) for file in files for name in imported(file) if name.split(".")[0] in ("callbacks", "recipes")]
    assert bare == []


LOOK_AROUND = """
import json, logging, os, random, signal, sys, warnings
import numpy, torch, lightning.pytorch, torchvision, matplotlib, PIL.Image, pycocotools.mask, typer, rich.console

def state():
    numpy_state = numpy.random.get_state()
    return {
        "threads": torch.get_num_threads(),
        "interop": torch.get_num_interop_threads(),
        "dtype": str(torch.get_default_dtype()),
        "matmul": torch.get_float32_matmul_precision(),
        "tf32": [torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32],
        "cudnn": [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled],
        "grad": torch.is_grad_enabled(),
        "cuda": torch.cuda.is_initialized(),
        "random": [hash(random.getstate()), numpy_state[1].tolist(), numpy_state[2], torch.get_rng_state().tolist()],
        "environ": dict(os.environ),
        "path": list(sys.path),
        "folder": os.getcwd(),
        "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM)],
        "hooks": [str(sys.excepthook), str(sys.displayhook)],
        "warnings": [str(f) for f in warnings.filters],
        "handlers": [str(h) for h in logging.getLogger().handlers],
        "levels": {n: logging.getLogger(n).level for n in ("", "lightning.pytorch", "lightning.fabric")},
        "largest": PIL.Image.MAX_IMAGE_PIXELS,
        "truncated": __import__("PIL.ImageFile").ImageFile.LOAD_TRUNCATED_IMAGES,
    }

before = state()
import importlib
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
after = state()
print(json.dumps({key: [before[key], after[key]] for key in before if before[key] != after[key]}))
"""


def test_importing_everything_has_no_effect() -> None:
    names = [dotted(path) for path in [*CORE, *LEAVES] if path.stem != "__main__"]
    assert "fasttrain.callbacks.channels_last.optimization" in names
    done = subprocess.run(
        [sys.executable, "-c", LOOK_AROUND, json.dumps(names)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}
    assert len(done.stdout.splitlines()) == 1, "an import prints nothing"


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from fasttrain.cli import app\n"
        "result = CliRunner().invoke(app, ['fit', '--help'])\n"
        "assert result.exit_code == 0, result.output\n"
        "heavy = {'torch', 'lightning', 'numpy', 'matplotlib', 'omegaconf'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

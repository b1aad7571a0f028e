"""Looks at an installed wheel from outside the checkout: its modules import, its data is there, its command runs."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import fasttrain

root = Path(fasttrain.__file__).parent
assert "site-packages" in str(root), f"fasttrain was imported from {root}, not from the wheel"
names = [module.name for module in pkgutil.walk_packages([str(root)], "fasttrain.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
wanted = ["recipes/retinanet.yaml", "recipes/bert.yaml", "configs/base.yaml", "configs/hardware/cpu.yaml", "py.typed"]
wanted += ["configs/optimizations/none.yaml", "callbacks/channels_last/README.md", "recipes/retinanet/README.md"]
wanted += ["report_page.html.j2", "mlperf/anchors.csv", "mlperf/reference_points.csv"]
missing = [name for name in wanted if not (root / name).is_file()]
assert not missing, f"the wheel lacks {missing}"

from fasttrain.recipe import find_recipe  # noqa: E402

assert find_recipe("retinanet").is_file()
assert subprocess.run([sys.executable, "-m", "fasttrain", "list"], check=False).returncode == 0
print(f"{len(names)} modules of the wheel import; its data files are there")

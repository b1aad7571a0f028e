"""Forked children leave alone what they inherit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PARENT = """
import gc, multiprocessing, os, sys
gc.disable()
{keep}
class Tells:
    def __del__(self):
        if os.getpid() != parent:
            open(sys.argv[1], "w").close()
parent = os.getpid()
tells = Tells()
tells.itself = tells
del tells
child = multiprocessing.get_context("fork").Process(target=gc.collect)
child.start()
child.join()
assert child.exitcode == 0
"""
KEEP = "from fasttrain.forks import keep_what_children_inherit as keep; keep(); keep()"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("keep", "freed"), [("", True), (KEEP, False)])
def test_a_childs_collector_frees_nothing_of_its_parents(keep: str, freed: bool, tmp_path: Path) -> None:
    mark = tmp_path / "freed"
    subprocess.run([sys.executable, "-c", PARENT.format(keep=keep), str(mark)], check=True)
    assert mark.exists() == freed

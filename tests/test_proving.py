"""An operator of somebody else's package is tried once, in a child process, and whatever it does there is told."""

import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain import proving
from fasttrain.callbacks.conv_bias_relu import in_apex
from fasttrain.fingerprint import package_fingerprint, why_not_importable
from fasttrain.proving import Proof, Trial, forget, prove
from fasttrain.proving_child import LONGEST, told_of

HERE = Path(__file__).parent
TRIAL = Trial("Apex's double", "apex", "doubling_trial:trial", timeout_seconds=60)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of proofs, empty, and nothing remembered."""
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path))
    proving._proof.cache_clear()
    yield tmp_path / "proofs"
    proving._proof.cache_clear()
    assert "apex" not in sys.modules, "the package must not be imported here"


@pytest.fixture
def fake_apex(monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = HERE / "fake_apex"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("FAKE_APEX", "")
    return folder


@pytest.fixture
def apex_here(fake_apex: Path) -> Iterator[None]:
    """For trials that are called in this process after all."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("apex", "doubling_trial")]:
        del sys.modules[name]


def kept_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_one_that_works(fake_apex: Path, cache: Path) -> None:
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    assert prove(TRIAL) == Proof(True, f"Apex's double gives its reference's numbers on {where}")
    (kept,) = kept_in(cache)
    assert kept["ok"]
    assert kept["package"] == "apex"
    assert kept["key"]["torch"] == torch.__version__
    assert kept["printed"] == "the fake apex is imported\n"


@pytest.mark.parametrize(
    ("does", "what", "lasting"),
    [
        ("segfault", "ended its process by SIGSEGV (Segmentation fault)", True),
        ("killed", "ended its process by SIGKILL (Killed)", False),
        ("exit", "ended its process with status 0 before it had an answer", True),
        ("raise", "raised RuntimeError: CUDNN_BACKEND_API_FAILED: no plan", True),
        ("wrong", "gives other numbers than its reference: double(21) is not 42", True),
    ],
)
def test_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch, fake_apex: Path, cache: Path, does: str, what: str, lasting: bool
) -> None:
    monkeypatch.setenv("FAKE_APEX", does)
    assert prove(TRIAL) == Proof(False, f"Apex's double {what}")
    assert len(kept_in(cache)) == lasting, "what may be otherwise tomorrow is not kept"
    if does == "segfault":
        assert 'doubling/__init__.py", line' in kept_in(cache)[0]["printed"], "where it was"


def test_one_that_hangs(monkeypatch: pytest.MonkeyPatch, fake_apex: Path) -> None:
    monkeypatch.setenv("FAKE_APEX", "hang")
    proof = prove(replace(TRIAL, timeout_seconds=1.5))
    assert proof == Proof(False, "Apex's double hung: it was not done after 1.5 s, and was ended")


@pytest.mark.parametrize(
    ("does", "what", "lasting"),
    [
        ("unbuilt", "can't be imported: No module named 'doubling_cuda'", True),
        ("memory", "found too little free memory to be tried: CUDA out of memory", False),
        ("assert", "raised AssertionError: a bias must be there", True),
    ],
)
def test_what_the_child_tells_of_errors(
    monkeypatch: pytest.MonkeyPatch, apex_here: None, does: str, what: str, lasting: bool
) -> None:
    monkeypatch.setenv("FAKE_APEX", does)
    assert told_of(TRIAL.target) == {"ok": False, "what": what, "lasting": lasting}


def test_a_long_error_is_told_in_part(monkeypatch: pytest.MonkeyPatch, apex_here: None) -> None:
    import doubling_trial

    def trial() -> None:
        torch.testing.assert_close(torch.zeros(2), torch.ones(2), msg="off \n" * LONGEST)

    monkeypatch.setattr(doubling_trial, "trial", trial)
    what = told_of(TRIAL.target)["what"]
    assert what.startswith("gives other numbers than its reference: off off ")
    assert what.endswith(" ...")
    assert "\n" not in what
    assert len(what) < LONGEST + 60


def test_a_package_that_is_missing() -> None:
    reason = "'no_such_package' is not installed"
    assert prove(replace(TRIAL, package="no_such_package")) == Proof(False, f"Apex's double is not there: {reason}")
    if why_not_importable("apex") is not None:
        assert "NVIDIA's Apex is built from https://github.com/NVIDIA/apex" in prove(TRIAL).reason


def test_the_other_project_of_that_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    namesake = tmp_path / "site" / "apex" / "__init__.py"
    namesake.parent.mkdir(parents=True)
    namesake.write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert prove(TRIAL) == Proof(
        False,
        f"Apex's double is not there: the installed 'apex' ({namesake}) is another project of that name, without "
        "apex.optimizers; NVIDIA's Apex is built from https://github.com/NVIDIA/apex",
    )
    assert kept_in(cache) == [], "installing the right one must be enough"


def test_it_is_tried_once(monkeypatch: pytest.MonkeyPatch, fake_apex: Path) -> None:
    monkeypatch.setenv("FAKE_APEX", "segfault")
    first = prove(TRIAL)
    monkeypatch.setenv("FAKE_APEX", "")
    assert prove(TRIAL) is first, "remembered in the process"
    proving._proof.cache_clear()
    assert prove(TRIAL) == first, "and kept for the next one"
    assert forget("another") == 0
    assert not prove(TRIAL).ok
    assert forget("apex") == 1
    assert prove(TRIAL).ok
    assert forget() == 1
    assert forget() == 0


def test_another_torch_or_build_of_the_package_is_another_question(
    monkeypatch: pytest.MonkeyPatch, fake_apex: Path, tmp_path: Path, cache: Path
) -> None:
    before = package_fingerprint("apex")
    assert package_fingerprint("apex") == before
    assert prove(TRIAL).ok
    proving._proof.cache_clear()
    monkeypatch.setattr(torch, "__version__", "2.99")
    assert prove(TRIAL).ok
    assert {kept["key"]["torch"] for kept in kept_in(cache)} > {"2.99"}
    built = tmp_path / "built" / "apex"
    for name in ("", "contrib", "optimizers"):
        (built / name).mkdir(parents=True, exist_ok=True)
        (built / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(built.parent))
    other = package_fingerprint("apex")
    assert other != before
    (built / "fused.so").write_bytes(b"machine code")
    assert package_fingerprint("apex") != other


def test_installed_packages_have_a_fingerprint_with_their_version() -> None:
    import packaging

    assert package_fingerprint("packaging").startswith(f"packaging {packaging.__version__} ")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"ok": true}', '{"ok": true, "key": {}}'])
def test_a_damaged_verdict_is_no_verdict(fake_apex: Path, cache: Path, content: str) -> None:
    assert prove(TRIAL).ok
    (path,) = cache.glob("*.json")
    whole = path.read_text()
    path.write_text(content)
    proving._proof.cache_clear()
    assert prove(TRIAL).ok
    assert path.read_text() == whole


def test_a_cache_that_cant_be_written_is_told_and_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, fake_apex: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=r"can't be kept in .*file.proofs .*; name a folder that can be .*FASTTRAIN_C"):
        assert prove(TRIAL).ok


def test_those_who_ask_at_the_same_time_wait_for_one_answer(
    monkeypatch: pytest.MonkeyPatch, fake_apex: Path, cache: Path
) -> None:
    tried = []
    plain = proving._try

    def counted(*arguments: Any) -> Any:
        tried.append(arguments)
        return plain(*arguments)

    monkeypatch.setattr(proving, "_try", counted)
    # Threads stand in for processes: each opens the lock for itself.
    askers = [threading.Thread(target=proving._proof.__wrapped__, args=(TRIAL, cache, None)) for _ in range(3)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len(tried) == 1


def test_another_trial_is_another_question(monkeypatch: pytest.MonkeyPatch, fake_apex: Path, tmp_path: Path) -> None:
    source = tmp_path / "trials" / "my_trial.py"
    source.parent.mkdir()
    source.write_text("def trial() -> None: ...\n")
    monkeypatch.syspath_prepend(str(source.parent))
    mine = replace(TRIAL, target="my_trial:trial")
    assert prove(mine).ok
    source.write_text("def trial() -> None: raise ValueError('stricter')\n")
    proving._proof.cache_clear()
    assert prove(mine).reason == "Apex's double raised ValueError: stricter"


@pytest.mark.parametrize(
    ("does", "found"), [("", None), ("wrong", "output: Tensor-likes are not"), ("wrong backward", "gradient of x: ")]
)
def test_the_trial_of_conv_bias_relu(
    monkeypatch: pytest.MonkeyPatch, apex_here: None, does: str, found: str | None
) -> None:
    monkeypatch.setenv("FAKE_APEX", does)
    told = told_of(in_apex.TRIAL.target)
    assert told["ok"] == (found is None), told
    assert found is None or f"gives other numbers than its reference: {found}" in told["what"]

"""The process in which `proving` tries an operator: `python -m fasttrain.proving_child module:function told.json [0]`.

The last argument is the GPU, if there is one. The child writes to `told.json` what came of it: `ok`; `what`, to be put
behind the operator's name; and whether that is `lasting`. If the operator ends the process, the file is missing.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

LONGEST = 400
"""Characters of an error that are told."""


def told_of(target: str, device: int | None = None) -> dict[str, Any]:
    """Call `module:function` and return what came of it."""
    if device is not None:
        import torch

        torch.cuda.set_device(device)
    module, _, function = target.partition(":")
    try:
        getattr(importlib.import_module(module), function)()
        if device is not None:
            torch.cuda.synchronize()  # what a kernel did wrong shows here
    except ImportError as error:
        return _told(f"can't be imported: {_text(error)}")
    except AssertionError as error:
        if not _is_of_trial(error, module):
            return _told(f"raised AssertionError: {_text(error)}")
        return _told(f"gives other numbers than its reference: {_text(error)}")
    except Exception as error:  # whatever a third party's code may raise
        if type(error).__name__ in ("OutOfMemoryError", "MemoryError"):
            return _told(f"found too little free memory to be tried: {_text(error)}", lasting=False)
        return _told(f"raised {type(error).__name__}: {_text(error)}")
    where = "the CPU" if device is None else torch.cuda.get_device_name(device)
    return _told(f"gives its reference's numbers on {where}", ok=True)


def main(arguments: list[str]) -> None:
    """Try the target and write what came of it."""
    target, path, *device = arguments
    Path(path).write_text(json.dumps(told_of(target, int(device[0]) if device else None)), encoding="utf-8")


def _is_of_trial(error: AssertionError, module: str) -> bool:
    """Whether the trial found fault with the numbers, and not the operator with how it was called."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    raised_in = str(last.tb_frame.f_globals.get("__name__", "")) if last is not None else ""
    return raised_in == module or raised_in.startswith("torch.testing.")


def _told(what: str, ok: bool = False, lasting: bool = True) -> dict[str, Any]:
    return {"ok": ok, "what": what, "lasting": lasting}


def _text(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


if __name__ == "__main__":
    main(sys.argv[1:])

"""Forked children, a torch loader's workers for instance, of a process that uses a GPU."""

import gc
import os
from functools import cache


@cache
def keep_what_children_inherit() -> None:
    """Have children that are forked from now on never free what was their parent's garbage.

    Python's collector may find a CUDA tensor, event or graph of the parent's in a cycle, and run, in the child, a
    destructor that calls CUDA, which doesn't work after a fork: the child is killed ("terminate called after throwing
    ... initialization error") and its loader says that a worker "exited unexpectedly". So what a child inherits is put
    where its collector doesn't look; that keeps pages shared, too.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)

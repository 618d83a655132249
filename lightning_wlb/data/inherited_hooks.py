"""Hooks whose work is done also where a subclass overrides them without calling ``super()``.

Lightning's own hooks do nothing, so that most users override them and call nobody. A few of ours
keep what a run resumes from, and a run would repeat documents or begin its learning rate anew if
they were left out. A class that calls :func:`keep_hooks` as it is subclassed has them run in front
of the override. They run twice where that calls ``super()`` too, and must allow it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def keep_hooks(root: type, cls: type, names: tuple[str, ...]) -> None:
    """Let the hooks that ``cls`` overrides run behind those that it would hide.

    Args:
        root: the class whose hooks, and those of whose subclasses, are kept.
        cls: a subclass that was just made.
        names: of the hooks.
    """
    hidden = next(each for each in cls.__mro__[1:] if issubclass(each, root))
    for name in names:
        own, theirs = getattr(cls, name), getattr(hidden, name)
        if own is not theirs:  # it may also be that of a mixin
            setattr(cls, name, _behind(theirs, own))


def _behind(theirs: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def hook(*args: Any, **kwargs: Any) -> Any:
        kept = theirs(*args, **kwargs)
        given = own(*args, **kwargs)
        return {**kept, **given} if isinstance(kept, dict) and isinstance(given, dict) else given

    return hook

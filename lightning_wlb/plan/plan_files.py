"""Plans as a file: JSON lines that another language can read, of a named and numbered format.

The first line is the header: ``format``, ``version``, the writer's remarks, and the number of
``plans``, which shows whether the file is truncated. Each further line is one step with the fields
of :class:`.StepPlan`, as :meth:`.StepPlan.to_json` writes them. ``docs/planner.md`` explains every
field. A change that old readers would misread gets a new ``version``; an added field does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_wlb.file_checks import open_regular, unambiguous
from lightning_wlb.plan.step import StepPlan

FORMAT = "lightning-wlb plans"
VERSION = 1


def write_plans(path: Path, plans: Iterable[StepPlan], about: Mapping[str, Any]) -> None:
    """Write plans to ``path``; ``about`` describes in plain types what they were made from."""
    plans = list(plans)
    header = {"format": FORMAT, "version": VERSION, **about, "plans": len(plans)}
    with path.open("w", encoding="utf-8") as file:
        print(json.dumps(header), file=file)
        for plan in plans:
            print(plan.to_json(), file=file)


def read_plans(path: str | Path) -> tuple[dict[str, Any], list[StepPlan]]:
    """What :func:`write_plans` wrote: the header, and the plans, each validated.

    Raises:
        ValueError: another format or a later version, a line that is no plan, a plan that cannot
            run, a step not later than the one before, or fewer plans than the header says.
    """
    with open_regular(Path(path)) as file:
        lines = file.read().decode().splitlines() or [""]
    plans: list[StepPlan] = []
    number = 1
    try:
        header: dict[str, Any] = json.loads(lines[0], object_pairs_hook=unambiguous)
        if (header["format"], header["version"]) != (FORMAT, VERSION):
            raise ValueError(f"{header['format']!r} version {header['version']} is another format")
        for text in lines[1:]:
            number += 1
            plans.append(StepPlan.from_json(text).validate())
            if [each.step for each in plans[-2:-1]] >= [plans[-1].step]:
                raise ValueError(f"step {plans[-1].step} does not follow {plans[-2].step}")
        if header.get("plans", len(plans)) != len(plans):
            raise ValueError(f"the file ends after {len(plans)} of {header['plans']} plans")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path}, line {number}: {error}. This version reads {FORMAT!r} version {VERSION}, as"
            " `lightning-wlb plan --write` makes it."
        ) from error
    return header, plans

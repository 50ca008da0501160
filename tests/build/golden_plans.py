"""The plans of all recipes as they are kept in `golden/`.

`python -m tests.build.golden_plans` writes them anew; look at the difference before keeping it.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

from build_engines.build_plan import BuildRequest, make_plan
from build_engines.plan_text import plan_text
from build_engines.recipes import NUMBER_TYPES, RECIPES, TP_SIZES

FOLDER = Path(__file__).parent / "golden"
CASES = tuple(product(RECIPES, TP_SIZES, NUMBER_TYPES))


def path_of(model: str, tp: int, dtype: str) -> Path:
    return FOLDER / f"{model}_h200_tp{tp}_{dtype}.txt"


def text_of(model: str, tp: int, dtype: str) -> str:
    request = BuildRequest(model=model, gpu="h200", tp=tp, dtype=dtype, host_bytes=64 * 10**9)
    return plan_text(make_plan(request)) + "\n"


def main() -> None:
    for case in CASES:
        path_of(*case).write_text(text_of(*case))


if __name__ == "__main__":
    main()

"""TensorRT-LLM on the machine that builds: is it there, which version, which GPUs does it see.

Owns that question, asked of the Python that will run the converters, in a process of its own: the
library takes half a minute and a GPU to import, and its faults must stay there.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from build_engines.build_plan import BUILD, CONVERT, BuildPlan
from tokenflow.errors import ConfigError

SUPPORTED = "1.2."
"""Versions begin so. The Executor is in 1.2.1 and gone after 1.3.0rc20; what pause and resume rely
on was recorded for 1.2."""

_MEMORY_SHARE = 0.97
"""Of the plan's GPU memory that must be there. GDDR6 with ECC shows a little less than the data
sheet says; a smaller board of the same name, or a part of a GPU, much less."""
_PROBE_TIMEOUT_S = 300.0
PROBE = """
import json, sys
import tensorrt_llm
import tensorrt_llm.bindings.executor as executor
import torch
gpus = [[torch.cuda.get_device_name(i), torch.cuda.get_device_properties(i).total_memory]
        for i in range(torch.cuda.device_count())]
print("\\n" + json.dumps({"version": tensorrt_llm.__version__,
                         "has_executor": hasattr(executor, "Executor"),
                         "python": sys.version.split()[0], "gpus": gpus}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """What was found. gpus: name and total memory in bytes of each GPU that CUDA shows."""

    version: str
    python: str
    gpus: tuple[tuple[str, int], ...]

    @property
    def versions(self) -> dict[str, str]:
        """For the manifest and the keys of steps."""
        return {"tensorrt_llm": self.version, "python": self.python}


def find_toolchain(plan: BuildPlan) -> Toolchain:
    """Look at the programs that the plan runs. Raises ConfigError for what is missing or wrong."""
    for step in plan.steps:
        if shutil.which(step.argv[0]) is None:
            key = "python" if step.name == CONVERT else BUILD
            raise ConfigError(
                key, f"{step.argv[0]} is not on PATH; run this in a TensorRT-LLM container"
            )
    script = Path(plan.steps[0].argv[1])
    if not script.is_file():
        raise ConfigError(
            "examples", f"{script} does not exist; --examples names the folder of the examples"
        )
    found = _probe(plan.request.python)
    _judge(found, plan)
    return found


def _probe(python: str) -> Toolchain:
    try:
        done = subprocess.run(
            [python, "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError("tensorrt_llm", f"{python} could not be asked: {error}") from error
    last = (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1:]
    if done.returncode:
        raise ConfigError("tensorrt_llm", f"{python} cannot import it: {' '.join(last)}")
    try:
        found = json.loads(last[0])
        version, has_executor = str(found["version"]), bool(found["has_executor"])
        gpus = tuple((str(name), int(size)) for name, size in found["gpus"])
        toolchain = Toolchain(version=version, python=str(found["python"]), gpus=gpus)
    except (IndexError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("tensorrt_llm", f"{python} gave no answer: {last}") from error
    if not has_executor:
        raise ConfigError(
            "tensorrt_llm", f"{version} has no Executor; it is in 1.2.1 and gone after 1.3.0rc20"
        )
    return toolchain


def _judge(found: Toolchain, plan: BuildPlan) -> None:
    if not found.version.startswith(SUPPORTED):
        raise ConfigError("tensorrt_llm", f"must be {SUPPORTED}x, found {found.version}")
    if not found.gpus:
        raise ConfigError("gpu", "CUDA shows no GPU; an engine is built on the GPU it is for")
    name, memory = found.gpus[0]
    if re.search(rf"\b{re.escape(plan.gpu.name_part)}\b", name) is None:  # no H200 in a GH200
        raise ConfigError(
            "gpu", f"the plan is for {plan.gpu.name}, this is {name}; an engine serves its own kind"
        )
    if memory < plan.budget.fixed_bytes:
        raise ConfigError(
            "gpu", f"{name} has {memory} bytes, {plan.budget.fixed_bytes} are needed before any KV"
        )
    if memory < _MEMORY_SHARE * plan.budget.gpu_bytes:
        raise ConfigError(
            "gpu_memory_gb",
            f"{name} has {memory / 1e9:.1f}, the plan is for {plan.budget.gpu_bytes / 1e9:.1f}; "
            "say what there is (--gpu-memory-gb)",
        )

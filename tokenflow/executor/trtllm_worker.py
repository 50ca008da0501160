"""A rank of an mpirun job that does not serve: `python -m tokenflow.executor.trtllm_worker k=v …`.

Under mpirun rank 0 is the server, and every other rank this program, with the same parameters (the
names of config.pbtxt): TensorRT-LLM wants all ranks to construct the executor alike. It computes
its share until the leader shuts down or is lost; mpirun then ends the job.

    mpirun -n 1 tritonserver … : -n 7 python -m tokenflow.executor.trtllm_worker gpt_model_path=…
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tokenflow.config import ServingConfig, parse_parameters
from tokenflow.errors import ConfigError, TokenFlowError
from tokenflow.executor.trtllm import construct, load_bindings
from tokenflow.executor.trtllm_config import check_supported
from tokenflow.executor.trtllm_engine import LIMITS, check_limits, read_built_engine
from tokenflow.executor.trtllm_modes import plan_parallel

logger = logging.getLogger("tokenflow")


def run_worker(config: ServingConfig, environment: Mapping[str, str], bindings: Any = None) -> None:
    """Compute until the leader ends. Raises ConfigError on rank 0 and outside of mpirun."""
    limits = config.executor_config()
    check_supported(config)
    built = read_built_engine(config.gpt_model_path)
    check_limits(built, {name: getattr(limits, name) for name in LIMITS})
    plan = plan_parallel(config, built, environment)
    if plan.rank == 0:
        raise ConfigError("engine", "rank 0, or a process without mpirun, is no worker: it serves")
    executor = construct(bindings or load_bindings(), built, limits, config, plan)
    logger.info("rank %d of %d computes", plan.rank, plan.num_ranks)
    executor.shutdown()  # on a rank that is not the leader: waits for its end


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 after the leader's end, 1 for what is refused."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    logging.basicConfig(format="%(asctime)s worker %(levelname)s: %(message)s", level=logging.INFO)
    parameters = {"engine": "trtllm"}
    for argument in given:
        key, has_value, value = argument.partition("=")
        if not has_value:
            sys.stderr.write(f"{__doc__}\n{argument!r} is not key=value\n")
            return 1
        parameters[key] = value
    try:
        run_worker(parse_parameters(parameters), os.environ)
    except TokenFlowError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

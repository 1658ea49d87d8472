"""A plan held against what is really there: engine's options, ports, GPUs, the plugin's settings.

Nothing is started here. What our router thinks of a plan is asked when it is made
(`launch.planning.plan`).
"""

from __future__ import annotations

import difflib

from deltaserve.child import PYTHON
from deltaserve.errors import InputError
from launch.asking import refusal
from launch.cache import make_folder
from launch.engines import options
from launch.hardware import check_gpus
from launch.models import is_shape, write_shape
from launch.planning import Plan, check_on_path, write_plugin
from launch.ports import check_free

_FEATURES = "DELTASERVE_SGLANG"
_PLUGIN_SETTINGS = (_FEATURES, "DELTASERVE_ELASTIC_", "DELTASERVE_PACED_")

# Flags that are given unless a key says otherwise, and that older releases lack.
_LEFT_OUT_BY = {"--incremental-streaming-output": "incremental_streaming_output = false"}


def check(made: Plan, *, gpus: bool = True) -> None:
    """Raises `InputError` for the first thing that would keep `made` from starting.

    With `gpus` False the GPUs are left out: a topology can be checked where there are none.
    """
    if made.engine.name == "sglang" and not all(w.attached for w in made.workers):
        check_on_path(made.run_dir)
    make_folder(made.run_dir)
    if is_shape(made.topology.model):
        write_shape(made.topology.model)
    write_plugin(made.plugin_dir)
    _check_flags(made)
    _check_plugin(made)
    check_free(made.ports)
    if gpus and made.gpu_plan:
        check_gpus(made.gpu_plan, made.topology.hardware, made.topology.where)


def _check_flags(made: Plan) -> None:
    where = made.topology.where
    about = f"{made.engine.name} {made.engine.version}"
    started = [worker for worker in made.workers if not worker.attached]
    if not started:
        return
    known = options(made.engine, started[0].full_environment())
    for worker in started:
        following = [*worker.argv[1:], ""]
        for at, token in enumerate(following):
            if not token.startswith("--"):
                continue
            spelled, sign, value = token.partition("=")
            # vLLM takes underscores for dashes, and --option.key for a key of a JSON option.
            flag = spelled.split(".")[0].replace("_", "-")
            option = known.get(flag) or known.get(spelled)
            if option is None:
                close = difflib.get_close_matches(flag, known, 1)
                hint = f" (did you mean {close[0]}?)" if close else ""
                if flag in _LEFT_OUT_BY:
                    hint = f"; {_LEFT_OUT_BY[flag]} leaves it out"
                raise InputError(f"{where}: {worker.id}: {about} has no flag {spelled}{hint}")
            if not sign:
                value = following[at + 1]
            if option.takes_value and option.choices and value not in option.choices:
                raise InputError(
                    f"{where}: {worker.id}: {about}: {spelled} cannot be {value!r}; "
                    f"expected one of: {', '.join(option.choices)}"
                )


def _check_plugin(made: Plan) -> None:
    """Raises `InputError` where our plugin would refuse a worker: for its release of SGLang, or for
    the settings in its environment. The plugin is asked."""
    asked: set[tuple[tuple[str, str], ...]] = set()
    for worker in made.workers:
        environment = worker.full_environment()
        settings = tuple((k, v) for k, v in environment.items() if k.startswith(_PLUGIN_SETTINGS))
        if worker.attached or not environment.get(_FEATURES) or settings in asked:
            continue
        asked.add(settings)
        code = f"from sglang_ext.plugin import check; check({made.engine.version!r})"
        plugin = [*PYTHON, "-c", code]
        if reason := refusal(plugin, environment, silent="the plugin does not import"):
            raise InputError(f"{made.topology.where}: {worker.id}: environment: {reason}")

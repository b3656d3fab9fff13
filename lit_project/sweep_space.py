"""What a sweep searches: its YAML file read and checked, a trial's options, and the same space for W&B."""

import itertools
import json
import math
import random
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_project.config_files import CONFIGS, find_config, read_yaml
from lit_project.errors import InputError

if TYPE_CHECKING:
    import optuna

SAMPLERS, PRUNERS = ("tpe", "random", "grid", "cmaes"), ("none", "median", "hyperband")
DIRECTIONS = ("maximize", "minimize")
#: What kind of value the other keys of the file have.
KINDS: dict[str, Any] = {"configs": list, "fixed": dict, "gpus": list, "timeout": int | float, "sampler": str | dict}
KINDS |= {"pruner": str | dict, "name": str, "metric": str, "folder": str, "storage": str}
#: What a trial of W&B's needs beside the sweep's own configs.
WANDB_CONFIG = "configs/logger/wandb.yaml"


@dataclass
class Parameter:
    """One config key that is searched.

    Args:
        low, high: the range, both ends included; integers if both are.
        log: search the logarithm.
        step: only ``low + k * step``.
        choices: instead of a range: numbers, strings, class names, or dicts such as ``{class_path, init_args}``.
        when: other parameters and the choice (or list of choices) that this one is searched with.
    """

    low: Any = None
    high: Any = None
    log: bool = False
    step: Any = None
    choices: list[Any] | None = None
    when: dict[str, Any] = field(default_factory=dict)

    @property
    def is_int(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def applies(self, values: dict[str, Any]) -> bool:
        """Whether it is searched beside the other parameters' ``values``."""
        return all(key in values and values[key] in _stored(wanted) for key, wanted in self.when.items())

    def suggest(self, trial: "optuna.Trial", key: str) -> Any:
        if self.choices is not None:
            return trial.suggest_categorical(key, _stored(self.choices))
        if self.is_int:
            return trial.suggest_int(key, self.low, self.high, step=self.step or 1, log=self.log)
        return trial.suggest_float(key, self.low, self.high, step=self.step, log=self.log)

    def points(self) -> list[Any] | None:
        """All its values; None if it is continuous."""
        if self.choices is not None:
            return _stored(self.choices)
        if self.is_int:
            return list(range(self.low, self.high + 1, self.step or 1))
        if self.step is None:
            return None
        return [self.low + k * self.step for k in range(math.floor((self.high - self.low) / self.step + 1e-8) + 1)]


@dataclass
class Sweep:
    """The content of a sweep's YAML file; ``configs/sweeps/lr_wd.yaml`` says what each key means."""

    name: str
    parameters: dict[str, Parameter]
    n_trials: int
    configs: list[str] = field(default_factory=list)
    fixed: dict[str, Any] = field(default_factory=dict)
    metric: str | None = None
    direction: str | None = None
    timeout: float | None = None
    sampler: dict[str, Any] = field(default_factory=lambda: {"name": "tpe"})
    pruner: dict[str, Any] = field(default_factory=lambda: {"name": "none"})
    n_workers: int = 1
    gpus: list[Any] | None = None
    storage: str | None = None
    storage_fallback: str | None = None
    folder: str = "runs/sweeps"

    @property
    def path(self) -> Path:
        """The sweep's own folder."""
        return Path(self.folder).expanduser().absolute() / self.name

    def suggest(self, trial: "optuna.Trial") -> dict[str, Any]:
        """Draw a trial's values."""
        values: dict[str, Any] = {}
        for key, parameter in self.parameters.items():
            if parameter.applies(values):
                values[key] = parameter.suggest(trial, key)
        return values

    def options(self, values: dict[str, Any]) -> list[str]:
        """What ``fit`` gets for a trial with ``values``."""
        options = [f"--config={path}" for path in self.configs] + _options(self.fixed)
        if self.metric:
            # the best checkpoint is then the best by what is optimised, and a wrong name ends a run at once
            options.append(f"--callbacks.best.monitor={self.metric}")
            options.append(f"--callbacks.best.mode={'max' if self.direction == 'maximize' else 'min'}")
        return options + _options(values)

    def examples(self) -> list[dict[str, Any]]:
        """Values that between them have every key, every class and every name in the space."""
        named = [
            len(parameter.choices)
            for parameter in self.parameters.values()
            if parameter.choices and any(isinstance(choice, str | dict) for choice in parameter.choices)
        ]
        examples = [self._example({}, number) for number in range(max(named, default=1))]
        for key, parameter in self.parameters.items():
            if not any(key in example for example in examples):
                examples.append(self._example({name: _stored(wanted)[0] for name, wanted in parameter.when.items()}, 0))
        return examples

    def _example(self, values: dict[str, Any], number: int) -> dict[str, Any]:
        drawn: dict[str, Any] = {}
        for key, parameter in self.parameters.items():
            if parameter.applies(drawn | values):
                stored = _stored(parameter.choices) if parameter.choices is not None else [parameter.low]
                drawn[key] = values.get(key, stored[number % len(stored)])
        return drawn

    def grid(self) -> list[dict[str, Any]]:
        """All points of a grid search, in random order."""
        points = [parameter.points() or [] for parameter in self.parameters.values()]
        grid = [dict(zip(self.parameters, values, strict=True)) for values in itertools.product(*points)]
        random.Random(self.sampler.get("seed", 0)).shuffle(grid)
        return grid

    def make_sampler(self, number: int) -> "optuna.samplers.BaseSampler":
        """The sampler of a trial, whose draws depend on the seed and its ``number`` alone.

        One sampler with a state would repeat its first draws when a sweep is resumed, and in every worker.
        """
        from optuna import samplers

        options = {key: value for key, value in self.sampler.items() if key not in ("name", "seed")}
        seed = random.Random(f"{self.sampler.get('seed', 0)} {number}").getrandbits(32)
        if self.sampler["name"] == "grid":
            grid = self.grid()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it is experimental, in Optuna's view
                return samplers.PartialFixedSampler(grid[number % len(grid)], samplers.RandomSampler(seed))
        kinds = {"tpe": samplers.TPESampler, "random": samplers.RandomSampler, "cmaes": samplers.CmaEsSampler}
        return kinds[self.sampler["name"]](seed=seed, **options)

    def make_pruner(self, max_epochs: int | None) -> "optuna.pruners.BasePruner":
        """The pruner; one validation is one of its steps."""
        from optuna import pruners

        options = {key: value for key, value in self.pruner.items() if key != "name"}
        if self.pruner["name"] == "hyperband":
            return pruners.HyperbandPruner(**{"max_resource": max_epochs or "auto"} | options)
        return {"none": pruners.NopPruner, "median": pruners.MedianPruner}[self.pruner["name"]](**options)

    def for_wandb(self, metric: str, direction: str) -> dict[str, Any]:
        """The same as a W&B sweep. Source: https://docs.wandb.ai/models/sweeps/define-sweep-configuration

        Raises:
            InputError: something that W&B's sweeps do not have.
        """
        method = {"tpe": "bayes", "random": "random", "grid": "grid"}.get(self.sampler["name"])
        if method is None:
            raise InputError(f"W&B has no sampler {self.sampler['name']!r}: choose tpe, random or grid.")
        if not (CONFIGS.parent / WANDB_CONFIG).is_file():
            raise InputError(f"--export-wandb needs {WANDB_CONFIG}, which this project was generated without.")
        for key, parameter in self.parameters.items():
            if parameter.when:
                raise InputError(f"parameters.{key}: W&B's sweeps have no conditions such as 'when'.")
        command = ["${env}", "${interpreter}", "-m", f"{__package__}.cli", "fit", *self.options({})]
        wandb: dict[str, Any] = {
            "name": self.name,
            "program": "lit_project/cli.py",  # asked for by W&B, and not used by the command
            "method": method,
            "metric": {"name": metric, "goal": direction},
            "run_cap": self.n_trials,
            "parameters": {key: _wandb_parameter(part, method) for key, part in self.parameters.items()},
            "command": [*command, f"--config={WANDB_CONFIG}", "${args}"],
        }
        if self.pruner["name"] == "hyperband":
            eta, least = self.pruner.get("reduction_factor", 3), self.pruner.get("min_resource", 1)
            wandb["early_terminate"] = {"type": "hyperband", "min_iter": least, "eta": eta}
        return wandb


def read_sweep(path: Path, options: dict[str, str] | None = None) -> Sweep:
    """Read a sweep's file.

    Args:
        path: the file, or its name in the project.
        options: options of ``fit`` for all trials, beside the file's.

    Raises:
        InputError: no such file, an unknown key, a space that is empty or contradicts itself.
    """
    raw = read_yaml(find_config(str(path)))
    try:
        return _checked({"name": path.stem} | raw, options or {})
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _checked(raw: dict[str, Any], options: dict[str, str]) -> Sweep:
    raw = {key: value for key, value in raw.items() if value is not None}
    _refuse_unknown("", raw, Sweep)
    for name, kind in KINDS.items():
        if name in raw and not isinstance(raw[name], kind):
            raise InputError(f"{name} is {raw[name]!r}, which is no value for it.")
    raw["fixed"] = raw.get("fixed", {}) | options
    space = raw.get("parameters")
    if not isinstance(space, dict) or not space:
        raise InputError("the space is empty: 'parameters' names no config key to search, such as model.optimizer.lr.")
    parameters: dict[str, Parameter] = {}
    for key, spec in space.items():
        parameters[key] = _parameter(f"parameters.{key}", spec)
        _check_condition(key, parameters)
    if both := sorted(parameters.keys() & raw["fixed"].keys()):
        raise InputError(
            f"{both[0]} is searched under 'parameters', and also fixed for all trials: remove one of them."
        )
    raw = raw | {"parameters": parameters}
    for name, known in (("sampler", SAMPLERS), ("pruner", PRUNERS)):
        if isinstance(raw.get(name, {}), str):
            raw[name] = {"name": raw[name]}
        if name in raw and raw[name].get("name") not in known:
            raise InputError(f"{name}.name is {raw[name].get('name')!r}: it must be one of {', '.join(known)}.")
    if (raw.get("metric") is None) != (raw.get("direction") is None) or raw.get("direction") not in (None, *DIRECTIONS):
        raise InputError(
            "give 'metric' with 'direction: maximize' or 'minimize', or neither: then it is what the best checkpoint "
            "is chosen by."
        )
    if raw.get("storage_fallback") not in (None, "local"):
        raise InputError(f"storage_fallback is {raw['storage_fallback']!r}: it must be 'local' or left out.")
    sweep = Sweep(**{"n_trials": 0} | raw)
    sampler = sweep.sampler["name"]
    for key, parameter in parameters.items():
        if sampler == "grid" and (parameter.points() is None or parameter.when):
            why = "is searched only under a condition" if parameter.when else "is continuous"
            raise InputError(f"sampler grid: {key} {why}. Give it choices or a step, or choose another sampler.")
        if sampler == "cmaes" and parameter.choices is not None:
            raise InputError(
                f"sampler cmaes: {key} has choices, and CMA-ES is for ranges only: choose another sampler."
            )
    if sampler == "grid":
        sweep.n_trials = min(sweep.n_trials or len(sweep.grid()), len(sweep.grid()))
    for name in ("n_trials", "n_workers"):
        if not isinstance(getattr(sweep, name), int) or getattr(sweep, name) < 1:
            raise InputError(f"{name} must be a whole number from 1 on.")
    return sweep


def check_samplers(sweep: Sweep) -> None:
    """Refuse options that the chosen sampler or pruner does not have; needs Optuna.

    Raises:
        InputError: there are some.
    """
    for name, make in (("sampler", lambda: sweep.make_sampler(0)), ("pruner", lambda: sweep.make_pruner(None))):
        try:
            make()
        except (TypeError, ValueError) as error:
            raise InputError(f"{name} {getattr(sweep, name)['name']}: {error}") from error


def _parameter(key: str, spec: Any) -> Parameter:
    if not isinstance(spec, dict):
        raise InputError(f"{key} is {spec!r}: give a range {{low, high}} or {{choices: [...]}}.")
    _refuse_unknown(key, spec, Parameter)
    if "choices" in spec:
        if given := sorted(spec.keys() & {"low", "high", "log", "step"}):
            raise InputError(f"{key} has choices and also {given[0]}: a parameter is one or the other.")
        if not isinstance(spec["choices"], list) or not spec["choices"]:
            raise InputError(f"{key}: choices is empty or no list.")
        return Parameter(**spec)
    if missing := [name for name in ("low", "high") if spec.get(name) is None]:
        raise InputError(f"{key} has no {' and no '.join(missing)}, and no choices either.")
    spec = spec | {
        name: _number(f"{key}.{name}", spec[name]) for name in ("low", "high", "step") if spec.get(name) is not None
    }
    low, high, step = spec["low"], spec["high"], spec.get("step")
    if low >= high:
        raise InputError(f"{key}: low ({low}) must be below high ({high}).")
    if spec.get("log") and low <= 0:
        raise InputError(f"{key}: low is {low}, and a logarithmic range must begin above 0.")
    if spec.get("log") and step is not None:
        raise InputError(f"{key}: a logarithmic range has no step.")
    if step is not None and not 0 < step <= high - low:
        raise InputError(f"{key}: step is {step}; it must be above 0 and fit between low and high.")
    if isinstance(step, float) and isinstance(low, int):
        spec["low"], spec["high"] = float(low), float(high)
    return Parameter(**spec)


def _check_condition(key: str, parameters: dict[str, Parameter]) -> None:
    for other, wanted in parameters[key].when.items():
        choices = parameters[other].choices if other in parameters and other != key else None
        if choices is None:
            raise InputError(f"parameters.{key}: 'when' names {other}, which is no parameter with choices above it.")
        if unknown := [value for value in _stored(wanted) if value not in _stored(choices)]:
            raise InputError(f"parameters.{key}: 'when' names {unknown[0]!r}, which is no choice of {other}.")


def _refuse_unknown(key: str, given: dict[str, Any], kind: type) -> None:
    import difflib

    known = list(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(known)}."
            raise InputError(f"{key + ': ' if key else ''}there is no key {name!r} here. {hint}")


def _number(key: str, value: Any) -> int | float:
    if isinstance(value, str):  # YAML takes 1e-3, without a dot, for text
        try:
            value = float(value)
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{key} must be a finite number.")
    return value


def _stored(value: Any) -> list[Any]:
    """Choices as Optuna can keep them: numbers, strings, and anything else as JSON."""
    values = value if isinstance(value, list) else [value]
    return [json.dumps(one) if isinstance(one, dict | list) else one for one in values]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _options(values: dict[str, Any]) -> list[str]:
    # a class before its arguments
    return [f"--{key}={_text(value)}" for key, value in sorted(values.items(), key=lambda item: item[0].count("."))]


def _wandb_parameter(parameter: Parameter, method: str) -> dict[str, Any]:
    points = parameter.points()
    limits: dict[str, Any] = {"min": parameter.low, "max": parameter.high}
    distribution = "log_uniform_values" if parameter.log else "uniform"
    if points is not None and (parameter.choices is not None or parameter.step or method == "grid"):
        # the agent writes a value as Python does: true would become True, and null None
        return {"values": [json.dumps(one) if one is None or isinstance(one, bool) else one for one in points]}
    if parameter.is_int and not parameter.log:
        return {"distribution": "int_uniform"} | limits
    if parameter.is_int:
        return {"distribution": f"q_{distribution}", "q": 1} | limits
    return {"distribution": distribution} | limits

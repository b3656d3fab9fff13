"""Configs as plain values: where they are, what they hold, and what one from a checkpoint means to the present code."""

import inspect
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from jsonargparse import Namespace

from lit_project.errors import InputError

PACKAGE = Path(__file__).parent
#: A checkout keeps the configs beside the package, an installed wheel inside it.
CONFIGS = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"
# jsonargparse reads 1e3 as a number, but PyYAML writes it without quotes: a class of that name would come back as 1000
yaml.SafeDumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
#: What some keys of a config must be; the parser does not say it, or not in these words.
_TAKES: dict[str, tuple[Any, str]] = {
    "data": (dict | str, "a class, or its class_path and init_args"),
    "model": (dict | str, "a class, or its class_path and init_args"),
    "trainer": (dict, "'name: value' lines"),
    "callbacks": (dict, "'name: value' lines; your own go to trainer.callbacks"),
    "loggers": (dict, "'name: value' lines; your own go to trainer.logger"),
    "trainer.default_root_dir": (str | None, "a folder"),
    "ckpt_path": (str | None, "a path, best or last"),
}


def find_config(value: str) -> str:
    """A config path as given, or else below the project's own configs, so that any working directory will do."""
    for path in (Path(value), CONFIGS.parent / value, CONFIGS / value):
        if path.is_file():
            return str(path.absolute())  # jsonargparse changes into its folder
    known = sorted(str(path.relative_to(CONFIGS.parent)) for path in CONFIGS.rglob("*.yaml"))
    raise InputError(f"--config {value}: there is no such file. The project's own: {', '.join(known)}.")


@cache
def default_config() -> dict[str, Any]:
    """``configs/default.yaml``."""
    return read_yaml(str(CONFIGS / "default.yaml"))


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice: YAML takes the last one, and what the first one says is lost."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if str(key.value) in lines:
                raise yaml.YAMLError(
                    f"{key.value} is there twice, in lines {lines[key.value]} and {line}. Put what belongs to it "
                    "under one."
                )
            lines[str(key.value)] = line
        return node


def read_yaml(path: str) -> dict[str, Any]:
    """The config in a file.

    Raises:
        InputError: it cannot be read, or holds no keys.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:  # which YAML's messages name
            config = yaml.load(file, _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        advice = " YAML is indented with spaces, not tabs." if r"'\t'" in str(error) else ""
        advice = " Save it as UTF-8." if isinstance(error, UnicodeDecodeError) else advice
        raise InputError(f"--config {path} cannot be read as YAML: {error}.{advice}") from error
    if not isinstance(config, dict):
        raise InputError(f"--config {path}: expected 'key: value' lines at the top level.")
    trainer = config.get("trainer")
    values = {f"trainer.{name}": value for name, value in trainer.items()} if isinstance(trainer, dict) else {}
    values |= config
    for key, (kind, takes) in _TAKES.items():
        if key in values and not isinstance(values[key], kind):
            is_ = "empty" if values[key] is None else repr(values[key])
            raise InputError(f"--config {path}: {key} is {is_}. It takes {takes}. Or delete the line.")
    _check_below(config, path, "", [])
    return config


def _check_below(value: Any, path: str, key: str, above: list[int]) -> None:
    """Refuse empty arguments, and what contains itself by an anchor."""
    if id(value) in above:
        raise InputError(f"--config {path}: {key} contains itself.")
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            below = f"{key}.{name}".lstrip(".")
            if name == "init_args" and part is None:
                raise InputError(f"--config {path}: {below} is empty. Give arguments, or delete the line.")
            _check_below(part, path, below, [*above, id(value)])


def bring_up_to_date(config: dict[str, Any], subcommand: str) -> list[str]:
    """Keep of a checkpoint's config, in place, what ``subcommand`` needs and the present code knows.

    Returns:
        A line on each difference between the code that wrote it and the present code.
    """
    if subcommand != "fit":  # how it was trained does not say how it is to be tested
        for key in config.keys() - {"seed_everything", "model", "data"}:
            del config[key]
    else:
        (config.get("trainer") or {}).pop("max_time", None)  # a limit on the process that wrote it
    changes = [change for key in ("model", "data") for change in _drop_unknown(key, config.get(key))]
    for group in ("callbacks", "loggers"):
        for name in config.get(group, {}).keys() - default_config()[group].keys():
            changes.append(f"{group}.{name}: there is no such part here, ignored")
            del config[group][name]
    return changes


def _drop_unknown(key: str, value: Any) -> Iterator[str]:
    """Drop arguments that a class in a checkpoint's config no longer has, and tell them and those it has gained."""
    if not isinstance(value, dict):
        return
    if "class_path" in value:
        parameters = _parameters(value["class_path"])
        arguments = value.get("init_args") or {}
        if parameters is not None:
            for name in [name for name in arguments if name not in parameters]:
                yield f"{key}.{name} = {arguments.pop(name)}: {value['class_path']} has no such argument, ignored"
            for name, parameter in parameters.items():
                if name not in arguments and parameter.default is not parameter.empty:
                    yield f"{key}.{name}: new here, has its default {parameter.default!r}"
        value = arguments
    for name, part in value.items():
        yield from _drop_unknown(f"{key}.{name}", part)


def _parameters(class_path: str) -> dict[str, inspect.Parameter] | None:
    """The arguments of a class or function by name, base classes' included; None if they cannot be told."""
    module, _, name = class_path.rpartition(".")
    try:
        target = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"The config names {class_path}, which does not exist here ({error}).") from error
    found: dict[str, inspect.Parameter] = {}
    for owner in inspect.getmro(target) if inspect.isclass(target) else (target,):
        if inspect.isclass(owner) and "__init__" not in vars(owner):
            continue
        try:
            parameters = inspect.signature(owner, eval_str=True).parameters
        except Exception:  # such as of a type that is imported for type checkers alone
            parameters = inspect.signature(owner).parameters
        found = {**parameters, **found}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
            return {name: parameter for name, parameter in found.items() if parameter.kind not in variadic}
    return None


def is_sequence(class_path: str, name: str) -> bool:
    """Whether an argument is a list or tuple, by its default or its annotation."""
    parameter = (_parameters(class_path) or {}).get(name)
    if parameter is None:
        return False
    kinds = [parameter.annotation, *get_args(parameter.annotation)]  # such as tuple[int, int] | None
    return isinstance(parameter.default, list | tuple) or any(
        get_origin(kind) in (list, tuple, Sequence) for kind in kinds
    )


def class_specs(key: str, value: Any) -> Iterator[tuple[str, Namespace]]:
    """Every {class_path, init_args} at or below ``value``, with its dotted key."""
    if isinstance(value, Namespace) and "class_path" in value:
        yield key, value
        for name, part in vars(value.get("init_args", Namespace())).items():
            yield from class_specs(f"{key}.{name}", part)


def leaf_names(config: Any) -> Iterator[str]:
    """The last parts of all dotted keys of a config."""
    if isinstance(config, dict):
        for name, part in config.items():
            yield name
            yield from leaf_names(part)


def plain(value: Any) -> Any:
    """A value as a config would have it: lists for tuples, one number for a square image size."""
    if not isinstance(value, list | tuple):
        return value
    values = [plain(part) for part in value]
    return values[0] if len(values) == 2 and values[0] == values[1] and isinstance(values[0], int) else values


def replaced(value: Any, old: str, new: str) -> Any:
    """A copy of a config with ``old`` replaced by ``new`` in every string."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, list):
        return [replaced(part, old, new) for part in value]
    if isinstance(value, dict):
        return {key: replaced(part, old, new) for key, part in value.items()}
    if isinstance(value, Namespace):
        return Namespace({key: replaced(part, old, new) for key, part in vars(value).items()})
    return value

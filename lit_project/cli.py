"""The command line: ``python -m lit_project.cli {fit,validate,test,predict}``, and the commands in ``commands/``.

LightningCLI does the parsing. This file adds what a run needs around it: the default config, a fresh run folder, the
facts that flow from the data to the model, everything that comes back from a checkpoint, and errors in one message.

What a run is made of, later wins: ``configs/default.yaml``, the checkpoint's config, each ``--config``, each option.
"""

import os
import signal
import sys

from lit_project import commands

if __name__ == "__main__":
    commands.dispatch(sys.argv)  # which ends the program, before the imports below that take seconds
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))  # while they take them

import argparse
import contextlib
import gc
import logging
import re
import secrets
import shutil
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import lightning as L
import torch
import yaml
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ProgressBar,
    WeightAveraging,
)
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.trainer.connectors.signal_connector import _get_sigkill_signal
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn

from lit_project.callbacks import KeyedRandomness, LastCheckpoint, PredictionWriter, RunRecord
from lit_project.callbacks.full_disk import tolerate_full_disk
from lit_project.callbacks.last_checkpoint import SIGNALS, Stopped, stop_at_once
from lit_project.callbacks.run_record import best_checkpoint, describe, hold
from lit_project.checkpoints import (
    AtomicCheckpointIO,
    find_checkpoint,
    holds_only_weights,
    keep_name_flat,
    read_checkpoint,
    steps_logged,
)
from lit_project.config_files import (
    CONFIGS,
    PACKAGE,
    bring_up_to_date,
    class_specs,
    default_config,
    find_config,
    is_sequence,
    leaf_names,
    plain,
    read_yaml,
    replaced,
)
from lit_project.data import ImagesToPredict, Shapes10
from lit_project.errors import InputError
from lit_project.files import short_path, write_atomically
from lit_project.hardware import best_precision, keep_freed_memory
from lit_project.out_of_memory import explain_out_of_memory
from lit_project.parse_errors import explain
from lit_project.resume import newest_run_of, refuse_changes, run_of_job, run_to_continue

#: What flows from the data to every part of the model that has a parameter of this name.
DATA_FACTS = ("num_classes", "class_names", "in_channels", "image_size")
#: Stand in configs for the run's folder and its name; replaced when the objects are made, kept in the saved config.
RUN_DIR, RUN_NAME = "{run_dir}", "{run_name}"
COMMAND = f"python -m {__package__}.cli"
#: Options that say what to do with a run, not what it is made of: they are not part of its config.
ACTION_KEYS = ("config", "ckpt_path", "images", "output", "force_resume")


class Start(NamedTuple):
    """What a command starts from."""

    #: The checkpoint, as read from its file, without the weights.
    checkpoint: dict[str, Any] | None
    #: Config files below any that the command line names.
    default_configs: list[Path]
    #: The last parts of the names of all model arguments that were given, not left at their defaults.
    given: set[str]
    #: The folder of the run that a fit continues.
    run_dir: Path | None = None


#: What a run folder has before anything has happened that would be worth a folder.
OF_THE_START = {"config.yaml", "run.json", "diff.patch", ".lock"}


class Parser(LightningArgumentParser):
    """Reports a parsing error in one message with the nearest right name, and exits with status 2."""

    def format_help(self, *args: Any) -> str:
        more = f"\nmore subcommands:\n{commands.overview()}\n" if self.prog == COMMAND else ""
        return super().format_help(*args) + more

    def parse_path(self, *args: Any, **kwargs: Any) -> Namespace:
        """Read a config file, which serves every subcommand: what only another one is told is left out."""
        config = super().parse_path(*args, **kwargs)
        for key in ACTION_KEYS:
            if f"--{key}" not in self._option_string_actions:
                config.pop(key, None)
        return config

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        parser = getattr(ex, "subcommand_parser", None) or self
        subcommand = next((name for name in sys.argv[1:] if name in CLI.subcommands()), "")
        sys.stderr.write(f"error: {explain(message, parser, sys.argv)}\n")
        sys.stderr.write(f"All options: {' '.join([COMMAND, subcommand]).strip()} --help\n")
        sys.exit(2)


class CLI(LightningCLI):
    """LightningCLI with a run folder, named default callbacks and loggers, and self-contained checkpoints."""

    def __init__(self, start: Start) -> None:
        self.checkpoint = start.checkpoint
        self.given = start.given
        self.continued = start.run_dir
        self.run_dir: Path | None = None
        self.finished = ""
        try:
            super().__init__(
                model_class=L.LightningModule,
                datamodule_class=L.LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                auto_configure_optimizers=False,  # the module has its own factories
                save_config_callback=None,  # see _open_run_folder
                parser_class=Parser,
                # an abbreviated option would be understood by the parser, but not where argv is searched for one
                parser_kwargs={"prog": COMMAND, "allow_abbrev": False}
                | {
                    name: {"default_config_files": [str(path) for path in start.default_configs], "allow_abbrev": False}
                    for name in self.subcommands()
                },
            )
        except (Exception, Stopped) as error:
            if hasattr(self, "trainer"):
                self.record.end(self.trainer, describe(error))
                launcher = self.trainer.strategy.launcher
                if launcher and not (isinstance(error, Stopped) and error.together):
                    launcher.kill(_get_sigkill_signal())  # ranks that would wait for this one
            if isinstance(error, Stopped):
                raise
            if hasattr(self, "trainer"):
                error = explain_out_of_memory(error, self.trainer) or error
            fail(error, self.run_dir)

    # ---- what can be configured

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        # what is left of each method's arguments is ckpt_path, so that one config file serves every subcommand
        skipped = {"model", "datamodule", "weights_only"}
        return {
            "fit": skipped | {"train_dataloaders", "val_dataloaders"},
            "validate": skipped | {"dataloaders", "verbose"},
            "test": skipped | {"dataloaders", "verbose"},
            "predict": skipped | {"dataloaders", "return_predictions"},
        }

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # A list in a config replaces the list before it, and with it the default callbacks. Named keys are merged:
        # default.yaml names them, a config changes or removes (null) one of them, trainer.callbacks adds to them.
        for group, base in (("callbacks", Callback), ("loggers", Logger)):
            for name in default_config()[group]:
                parser.add_argument(f"--{group}.{name}", type=base | None, default=None)

    def setup_parser(self, *args: Any) -> None:
        super().setup_parser(*args)
        self._parser("fit").add_argument(
            "--force_resume", type=bool, default=False, help="Resume with settings that change the optimisation."
        )
        predict = self._parser("predict")
        predict.add_argument("--images", type=str | list[str] | None, help="An image file, a folder, or a glob.")
        predict.add_argument("--output", type=str | None, help="The CSV file to write. Default: in the run folder.")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        subcommand = self.config.subcommand
        if subcommand != "fit" and not self.config[subcommand].ckpt_path:
            raise InputError(
                f"{subcommand} needs a trained model; without one it would score random weights. Give --ckpt_path with "
                "a checkpoint file or a run folder, or --ckpt_path best for the newest run's best checkpoint."
            )
        if subcommand == "predict" and not self.config.predict.images:
            raise InputError("predict needs images: give --images with an image file, a folder, or a quoted glob.")

    def _parse_ckpt_path(self) -> None:
        """Lightning lets a checkpoint's values override the command line's; here they only replace defaults."""

    @property
    def _resumed(self) -> dict[str, Any]:
        """The checkpoint whose training a fit goes on with; empty if it starts a new one."""
        resumes = self.subcommand == "fit" and self.checkpoint and not holds_only_weights(self.checkpoint)
        return (self.checkpoint or {}) if resumes else {}

    # ---- from config to objects

    def before_instantiate_classes(self) -> None:
        if self.subcommand != "predict" or "preprocessing" not in (self.checkpoint or {}):
            self._fit_model_to_data()
        self._open_run_folder()

    def instantiate_classes(self) -> None:
        # a saved config must not point at the folder of the run that saved it, so self.config keeps the placeholder
        assert self.run_dir is not None
        config = self.config
        self.config = replaced(replaced(config, RUN_DIR, str(self.run_dir)), RUN_NAME, self.run_dir.name)
        try:
            super().instantiate_classes()
        finally:
            self.config = config
        preprocessing = (self.checkpoint or {}).get("preprocessing")
        if preprocessing and hasattr(self.datamodule, "use_preprocessing"):
            self.datamodule.use_preprocessing(preprocessing)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        config = {**self._get(self.config_init, "trainer"), **kwargs, "default_root_dir": str(self.run_dir)}
        if config["logger"] in (None, True):
            config["logger"] = self.subcommand != "predict" and self._named("loggers")
        device = _device(config["accelerator"])
        if config["precision"] is None:
            config["precision"], reason = best_precision(device)
            rank_zero_info(f"trainer.precision: {config['precision']}, as {reason}.")
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32
        config["callbacks"] = self._callbacks(config)
        plugins = config["plugins"] or []
        plugins = plugins if isinstance(plugins, list) else [plugins]
        config["plugins"] = plugins if _any_is(plugins, CheckpointIO) else [*plugins, AtomicCheckpointIO()]
        try:
            trainer = L.Trainer(**config)
        except ValueError as error:
            raise InputError(f"trainer: {error}") from error
        tolerate_full_disk(trainer)
        keep_freed_memory()
        self.finished = self._finished(trainer)
        if not self.finished:
            self.record.begin(trainer)
        return trainer

    def _named(self, group: str) -> list[Any]:
        return [part for part in vars(self._get(self.config_init, group)).values() if part is not None]

    def _callbacks(self, trainer_config: dict[str, Any]) -> list[Callback]:
        """The named callbacks and the user's own, without those that would clash."""
        own = trainer_config["callbacks"] or []
        own = own if isinstance(own, list) else [own]
        only_one = (EarlyStopping, LearningRateMonitor, ProgressBar)
        unwanted: list[type[Callback]] = [kind for kind in only_one if _any_is(own, kind)]
        for kind in unwanted:
            rank_zero_info(f"trainer.callbacks brings its own {kind.__name__}, which takes the default one's place.")
        if not trainer_config["logger"] or trainer_config["fast_dev_run"]:
            unwanted.append(LearningRateMonitor)  # it refuses to run without a logger
        if trainer_config["enable_progress_bar"] is False:
            unwanted.append(ProgressBar)
        if self.subcommand != "fit":
            unwanted.append(WeightAveraging)  # the checkpoint's weights are the average already; it would warn of them
        if self.subcommand != "fit" and not _any_is(own, ModelCheckpoint):
            trainer_config["enable_checkpointing"] = False
        if trainer_config["enable_checkpointing"] is False or trainer_config["fast_dev_run"]:
            unwanted += [ModelCheckpoint, LastCheckpoint]
        named = [callback for callback in self._named("callbacks") if not isinstance(callback, tuple(unwanted))]
        for callback in named:
            if (
                isinstance(callback, ModelCheckpoint)
                and callback.save_top_k not in (0, 1)
                and "{" not in (callback.filename or "{")
            ):
                raise InputError(
                    f"callbacks: with save_top_k {callback.save_top_k}, several checkpoints of the one name "
                    f"{callback.filename!r} would replace each other. Give them a name such as "
                    "--callbacks.best.filename='{epoch}'."
                )
            if isinstance(callback, LastCheckpoint) and trainer_config["max_time"] is not None:
                # Lightning's limit ends the run with a validation that an uninterrupted one would not have had
                callback.max_seconds = _time_limit(trainer_config["max_time"])
                trainer_config["max_time"] = None
                if trainer_config["max_epochs"] is None:
                    trainer_config["max_epochs"] = -1  # without a limit of any kind, Lightning would make it 1000
        for callback in [*named, *own]:
            if isinstance(callback, ModelCheckpoint):
                keep_name_flat(callback)
                # Lightning's choice would be the first logger's folder
                callback.dirpath = callback.dirpath or f"{self.run_dir}/checkpoints"
        # the default checkpoints come first: trainer.checkpoint_callback is the first of its kind
        ckpt_path = self.config[self.subcommand].ckpt_path
        started = {"command": sys.orig_argv, "subcommand": self.subcommand, "ckpt_path": ckpt_path and str(ckpt_path)}
        self.record = RunRecord(self.run_config, started)
        callbacks = [*named, *own, KeyedRandomness(), self.record]
        if self.subcommand == "predict":
            output = Path(self.config.predict.output or f"{self.run_dir}/predictions.csv").expanduser()
            if _is_rank_zero():
                _check_output(output)
            self.writer = PredictionWriter(output)
            callbacks.append(self.writer)
        return callbacks

    def _fit_model_to_data(self) -> None:
        """Fill what the data knows (see ``DATA_FACTS``) into the model's config and its network's.

        Raises:
            InputError: the config already says otherwise, be it by hand or from a checkpoint.
        """
        config = self.config[self.subcommand]
        data = self._parser(self.subcommand).instantiate(Namespace(data=config.data)).data
        del self.config_dump  # Lightning took it for the hyper-parameters, but the model's config changes below
        facts = {name: plain(getattr(data, name)) for name in DATA_FACTS if hasattr(data, name)}
        for key, spec in class_specs("model", config.model):
            for name, fact in facts.items():
                if name not in spec.get("init_args", {}):
                    continue
                given = plain(spec.init_args[name])
                # what was not given may still be set: jsonargparse keeps the arguments of a class that was replaced
                if name in self.given and given not in (None, fact):
                    source = "the checkpoint's" if self.checkpoint else "the configured"
                    raise InputError(
                        f"{key}.{name} is {given} in {source} model, but the data has {fact}. Use data that fits the "
                        f"model, or leave {key}.{name} out to have it taken from the data."
                    )
                # a square size is one number, unless the network says that it takes two
                pair = name == "image_size" and isinstance(fact, int) and is_sequence(spec.class_path, name)
                spec.init_args[name] = [fact, fact] if pair else fact
        optimizer = config.model.get("init_args", {}).get("optimizer")
        if optimizer is not None and "lr" not in self.given and not self.checkpoint:
            default = default_config()["model"]["init_args"]["optimizer"]["class_path"]
            if optimizer.class_path != default:
                rank_zero_warn(
                    f"{optimizer.class_path} takes over the learning rate {optimizer.init_args.get('lr')} that was set "
                    f"for {default}. Give it one of its own with --model.optimizer.lr."
                )
        # what was found is kept, so that other images are later brought to the same size and have the same classes
        for name, fact in facts.items():
            if config.data.get("init_args", {}).get(name, 0) is None:
                config.data.init_args[name] = fact
        # and where it was found, so that a later command may start in another folder
        for name, given in list(vars(config.data.get("init_args", Namespace())).items()):
            held = getattr(data, name, None)
            if isinstance(given, str | Path) and isinstance(held, Path) and held.absolute() == Path(given).absolute():
                config.data.init_args[name] = type(given)(held.absolute())

    def _open_run_folder(self) -> None:
        """Make a new folder for this run and keep its resolved config there, as plain values."""
        config = self.config[self.subcommand].clone()
        for key in ACTION_KEYS:
            config.pop(key, None)
        dump = self._parser(self.subcommand).dump(config, skip_none=False, skip_validation=True, format="yaml")
        self.run_config = yaml.safe_load(dump)
        before = self._resumed.get("config")
        if before is not None and not self.config.fit.force_resume:
            refuse_changes(before, self.run_config)
        root = Path(config.trainer.default_root_dir or "runs").expanduser().absolute()
        job = f"-job{os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
        name = f"{self.subcommand}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}{job}"
        folder = self.continued or root / name
        if _is_rank_zero():  # the other ranks get every path they write to from the first
            if self.continued:
                hold(folder)  # before its config is replaced
            try:
                folder.mkdir(parents=True, exist_ok=self.continued is not None)
                _write_config(folder / "config.yaml", yaml.safe_dump(self.run_config, sort_keys=False))
            except OSError as error:
                failed = "written to" if folder.is_dir() else "made"
                raise InputError(
                    f"The run's folder {folder} cannot be {failed}: {error.strerror}. Choose where runs go with "
                    "--trainer.default_root_dir."
                ) from error
        self.run_dir = folder

    # ---- subcommands: what is said before and after Lightning does the work

    def fit(self, **kwargs: Any) -> None:
        """Train, unless the run that is resumed has come to its end: its folder is left as it is."""
        if self.finished:
            return
        if self.continued:
            for logger in self.trainer.loggers:
                if hasattr(logger, "resume_at"):
                    logger.resume_at(steps_logged(self._resumed))
        gc.freeze()  # what has been imported lives as long as the run: no use in looking through it again and again
        self.trainer.fit(**kwargs)

    def _finished(self, trainer: L.Trainer) -> str:
        """Why the run that is resumed has nothing left to do, and what would give it more; empty if it has."""
        if self.continued is None:
            return ""
        states = self._resumed.get("callbacks", {})
        for callback in trainer.early_stopping_callbacks:
            if states.get(callback.state_key, {}).get("wait_count", -1) >= callback.patience:
                return "early stopping ended it. To go on, raise --callbacks.early_stopping.patience"
        if trainer.max_epochs is not None and -1 < trainer.max_epochs <= self._resumed["epoch"]:
            return "it is at its planned end. To go on, raise --trainer.max_epochs"
        if -1 < trainer.max_steps <= self._resumed["global_step"]:
            return "it is at its planned end. To go on, raise --trainer.max_steps"
        return ""

    def before_predict(self) -> None:
        preprocessing = (self.checkpoint or {}).get("preprocessing")
        if preprocessing is None and hasattr(self.datamodule, "preprocessing"):
            self.datamodule.prepare_data()  # plain weights: the data that is given with them says it
            preprocessing = self.datamodule.preprocessing()
        if preprocessing is None:
            raise InputError("This checkpoint does not say how its images were prepared, so predict cannot use it.")
        self.datamodule = ImagesToPredict(
            images=self.config.predict.images,
            preprocessing=preprocessing,
            batch_size=getattr(self.datamodule, "batch_size", None) or 128,
        )

    def predict(self, **kwargs: Any) -> None:
        self.trainer.predict(**kwargs, return_predictions=False)

    @rank_zero_only
    def after_fit(self) -> None:
        if self.finished:
            print(f"\nNothing was trained: the run is finished, as {self.finished}.")
            return
        written = best_checkpoint(self.trainer)
        best = written if written and written.monitor and written.best_model_score is not None else None
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        last = next((c.path for c in callbacks if isinstance(c, LastCheckpoint)), None)
        if not written and (last is None or not last.is_file()):
            print(f"\nRun folder: {short_path(self.run_dir)} (no checkpoint was written)")
            return
        for callback in self.trainer.early_stopping_callbacks:
            if callback.wait_count >= callback.patience:
                times = f"{callback.patience} validations"
                print(f"\nStopped early: {callback.monitor} has not got better in the last {times}.", end="")
        paths = (best and best.best_model_path, last, written and written.best_model_path)
        checkpoint = Path(next(path for path in paths if path))
        if best:
            print(f"\nBest checkpoint: {short_path(checkpoint)} ({best.monitor} {best.best_model_score:.4f})")
        else:
            print(f"\nLast checkpoint: {short_path(checkpoint)} (there is no best, as no metric was monitored)")
        print(f"Run folder: {short_path(self.run_dir)}\nNext:")
        command = f"{short_path(Path(sys.executable))} -m {__package__}.cli"  # the interpreter that has the packages
        steps = {"test it": f"test --ckpt_path {short_path(checkpoint)}"}
        if isinstance(self.datamodule, Shapes10):
            steps["train on CIFAR-10"] = "fit --config configs/cifar10.yaml"
            steps["train on your images"] = "fit --config configs/image_folder.yaml --data.root FOLDER"
        elif hasattr(self.datamodule, "preprocessing"):
            steps["predict"] = f"predict --ckpt_path {short_path(checkpoint)} --images IMAGES --output predictions.csv"
        for step, arguments in steps.items():
            print(f"  {step + ':':22}{command} {arguments}")

    @rank_zero_only
    def after_validate(self) -> None:
        print(f"Run folder: {short_path(self.run_dir)}")

    after_test = after_validate

    @rank_zero_only
    def after_predict(self) -> None:
        errors = f", {self.writer.num_errors} of them unreadable" if self.writer.num_errors else ""
        count = len(self.datamodule.paths)
        if self.writer.num_errors == count:
            raise InputError(f"No image could be read; {short_path(self.writer.output)} says why.")
        print(f"Predictions for {count:,} image{'s' * (count != 1)}{errors}: {short_path(self.writer.output)}")


def main() -> None:
    """Run the command line; every error ends in one message and an exit status other than 0."""
    commands.dispatch(sys.argv)
    _quieten()
    with tempfile.TemporaryDirectory() as folder:
        try:
            start = _prepare(sys.argv, Path(folder))
        except Exception as error:
            fail(error)
        CLI(start)


def _prepare(argv: list[str], folder: Path) -> Start:
    """Resolve config and checkpoint paths in ``argv`` in place, and put configs before options, which win."""
    subcommand = next((argument for argument in argv[1:] if argument in CLI.subcommands()), None)
    first = argv.index(subcommand) + 1 if subcommand else 1
    given_configs, options = [], []
    arguments = iter(argv[first:])
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if option in ("-c", "--config"):
            value = value if equals else next(arguments, "")
            if not value:
                raise InputError(f"{option} needs a file, such as configs/cifar10.yaml.")
            given_configs.append(f"{option}={find_config(value)}")
        else:
            options.append(argument)
    argv[first:] = given_configs + options
    configs = [CONFIGS / "default.yaml"]
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("-c", "--config", action="append", default=[])
    finder.add_argument("--ckpt_path", nargs="?")
    finder.add_argument("--trainer.default_root_dir", dest="runs", nargs="?")
    given, _ = finder.parse_known_args(argv[1:])
    in_files = [read_yaml(path) for path in given.config]
    names = {argument.split("=")[0].rsplit(".", 1)[-1] for argument in argv if argument.startswith("--model.")}
    names |= {name for config in in_files for name in leaf_names(config.get("model"))}
    wanted = given.ckpt_path or next((c["ckpt_path"] for c in reversed(in_files) if c.get("ckpt_path")), None)
    trainers = [c["trainer"] for c in reversed(in_files) if isinstance(c.get("trainer"), dict)]
    roots = [trainer.get("default_root_dir") for trainer in trainers]
    runs = Path(given.runs or next(filter(None, roots), "runs")).expanduser()
    if wanted is None and subcommand == "fit" and int(os.environ.get("SLURM_RESTART_COUNT", 0)):
        # a requeued job is started with the same commands, and each goes on where it was
        interrupted = run_of_job(os.environ.get("SLURM_JOB_ID", ""), sys.orig_argv, runs)
        wanted = str(interrupted) if interrupted else None
    if wanted in (None, "null") or subcommand is None:
        return Start(None, configs, names)
    default: Literal["best", "last"] = "last" if subcommand == "fit" else "best"
    newest = wanted == "last" and subcommand == "fit"
    if newest:
        named = {argument.split("=")[0].removeprefix("--") for argument in options if argument.startswith("--")}
        path = newest_run_of(in_files, runs, named).absolute()
    else:
        path = find_checkpoint(wanted, runs, default=default).absolute()
    if wanted in ("best", "last"):
        rank_zero_info(f"--ckpt_path {wanted}: {short_path(path)}")
    argv.append(f"--ckpt_path={path}")  # the last one wins
    checkpoint = read_checkpoint(path)
    continued = run_to_continue(path, checkpoint) if subcommand == "fit" else None
    del checkpoint["state_dict"]  # Lightning reads the weights again; here they would only take memory
    if subcommand == "fit" and holds_only_weights(checkpoint):
        rank_zero_info(f"{short_path(path)} holds weights and no training: a new one starts with them at step 0.")
    config = checkpoint.get("config")
    says = {argument.split("=")[0] for argument in argv} & {"--model", "--model.network", "--data"}
    if not isinstance(config, dict) and not given.config and not says:
        raise InputError(
            f"{path} does not carry the config it was trained with: give it with --config, or options such as "
            "--model.network."
        )
    if isinstance(config, dict):
        names |= set(leaf_names(config.get("model")))
        if changes := bring_up_to_date(config, subcommand):
            rank_zero_info("The checkpoint's config was written by other code:\n  " + "\n  ".join(changes))
        configs.append(folder / "checkpoint.yaml")
        configs[-1].write_text(yaml.safe_dump(config))
    return Start(checkpoint, configs, names, continued)


def _write_config(file: Path, text: str) -> None:
    """Write a run's config; one that is there and differs is kept beside it, under a number."""
    if file.is_file():
        before = file.read_text(encoding="utf-8")
        if before == text:
            return
        number = 1 + len(list(file.parent.glob("config-*.yaml")))
        write_atomically(file.with_name(f"config-{number}.yaml"), lambda copy: copy.write(before.encode()))
    write_atomically(file, lambda new: new.write(text.encode()))


def _device(accelerator: Any) -> torch.device:
    """The kind of device that Lightning takes for ``trainer.accelerator``."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.device("cuda")
    if accelerator in ("auto", "gpu", "mps") and torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def _time_limit(limit: str | timedelta | dict[str, int]) -> float:
    """``trainer.max_time`` in each of the forms that Lightning takes, in seconds."""
    if isinstance(limit, str):
        parts = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", limit.strip())
        if not parts:
            raise InputError(
                f"trainer.max_time is {limit!r}. It is DAYS:HOURS:MINUTES:SECONDS: an hour and a half is 00:01:30:00."
            )
        limit = dict(zip(("days", "hours", "minutes", "seconds"), map(int, parts.groups()), strict=True))
    return (timedelta(**limit) if isinstance(limit, dict) else limit).total_seconds()


def _check_output(file: Path) -> None:
    """Make the folder of a file that is to be written at the end: what stands in its way is said at the start."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir() or not os.access(file.parent, os.W_OK):
            raise OSError("it is a folder" if file.is_dir() else "no permission to write there")
    except OSError as error:
        raise InputError(f"--output {file} cannot be written: {error.strerror or error}.") from error


def _is_rank_zero() -> bool:
    return getattr(rank_zero_only, "rank", 0) == 0


def _any_is(objects: list[Any], kind: type) -> bool:
    return any(isinstance(item, kind) for item in objects)


def _quieten() -> None:
    """Drop the notices that ask for nothing, so that those that do are seen."""
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # they are about Lightning's own calls
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda r: "💡" not in r.getMessage())
    # a batch is one gather from memory: workers would only slow it down
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # each epoch's metrics are logged whatever the interval between steps
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
    # a test does without the callbacks that wrote its checkpoint
    warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint need to be provided.*")
    # the summary's size in MB is that of float32 weights, which mixed precision keeps
    warnings.filterwarnings("ignore", message=".*is not supported by the model summary.*")
    # between Lightning's and torch's internals
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")


def fail(error: Exception, run_dir: Path | None = None) -> NoReturn:
    """Say what went wrong in one message and exit with status 1; with ``LIT_DEBUG=1`` raise it instead."""
    if os.environ.get("LIT_DEBUG") == "1":
        raise error
    while isinstance(error.__cause__, Exception) and str(error).startswith(
        "Does not validate against any of the Union"
    ):
        error = error.__cause__  # jsonargparse takes any error in a class's __init__ for a value of the wrong type
    frames = traceback.extract_tb(error.__traceback__)
    # a ValueError of the project's own is an argument out of its range
    ours = isinstance(error, ValueError) and bool(frames) and Path(frames[-1].filename).is_relative_to(PACKAGE)
    expected = isinstance(error, InputError | MisconfigurationException) or ours
    message = str(error) if expected else f"{type(error).__name__}: {error}"
    rank_zero = _is_rank_zero()
    made = run_dir is not None and run_dir.is_dir() and rank_zero
    if expected and made and run_dir and {path.name for path in run_dir.iterdir()} <= OF_THE_START:
        shutil.rmtree(run_dir, ignore_errors=True)  # nothing has happened yet that would be worth a folder
    elif not expected:
        message += f"\n  raised in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        text = "".join(traceback.format_exception(error))
        if not rank_zero:
            message += f"\n{text}"  # the run folder is the first rank's
        elif made and run_dir:
            with contextlib.suppress(OSError):  # the disk may be what failed
                (run_dir / "error.txt").write_text(text, encoding="utf-8", errors="replace")
                message += f"\n  traceback: {short_path(run_dir / 'error.txt')}"
        message += "\n  LIT_DEBUG=1 shows the traceback here"
    sys.stderr.write(f"error: {message}\n")
    sys.exit(1)


if __name__ == "__main__":
    for number in SIGNALS:
        signal.signal(number, stop_at_once)
    main()

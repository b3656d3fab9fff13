"""Keeps what the model made of each image, and ends each run with ``report.html`` and pictures in its loggers."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lit_project import figures
from lit_project.callbacks.run_record import RunRecord, best_checkpoint, describe
from lit_project.files import write_atomically
from lit_project.report import CHECKPOINT_KEY, DATA_FILE, caption, write_report
from lit_project.results import Results, join, judge

#: Images whose logits are kept before they are judged: doing so in each step would cost more than the step.
_BUFFER = 8192
_MOST_MISTAKES, _MOST_OF_BATCH = 24, 24


class Report(Callback):
    """Writes ``report.html`` to the run folder when a fit, validation or test ends.

    There is one however it ends, once the first batch was there (the sanity check does not count): a run that fails
    before has only its ``run.json``, of which ``python -m lit_project.cli report`` makes one.

    What it says of classes and images is of the evaluation that the best checkpoint comes from, or of the last one
    where nothing is monitored. These results are in each checkpoint, some 20 bytes an image, so that a resumed run has
    them. Of several processes, each brings the images that it was given, and each image counts once.

    TensorBoard, and each logger that has Lightning's ``log_image``, gets the first training batch when the training
    begins, and the confusion matrix and the worst mistakes when it ends.

    Needs a module whose ``validation_step`` and ``test_step`` return the logits ``[B, num_classes]``, and batches that
    end up as images and one class each, ``0..num_classes - 1``; otherwise the report has only curves and the run
    record. Nothing here draws from a random generator or touches what is trained. A report that fails is a warning.
    """

    def __init__(self) -> None:
        self._buffer: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._buffered = 0
        self._judged: list[Results] = []
        # of the evaluation: whether, as far as is known, each image is of one class, and of how many
        self._has_classes, self._num_classes = True, 0
        #: What report.pt will have of the last evaluation, and of that which the best checkpoint comes from.
        self._latest: dict[str, Any] | None = None
        self._kept: dict[str, Any] | None = None
        self._kept_score: float | None = None
        self._first_batch: dict[str, Any] | None = None
        self._begun = self._done = False

    # ---- the first batch

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._kept_score = _best_score(trainer)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._begun:
            self._begun = True
            if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
                _or_warn(
                    "The first batch could not be kept", partial(self._keep_first_batch, trainer, pl_module, batch)
                )

    def _keep_first_batch(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any) -> None:
        file = Path(trainer.default_root_dir) / DATA_FILE
        if file.is_file():  # the run goes on
            self._first_batch = torch.load(file, weights_only=True).get("first_batch")
            return
        preprocessing = getattr(_data(trainer), "preprocessing", None)
        if preprocessing is None or not _is_pair(batch):
            return
        known = preprocessing()
        images, targets = (part[:_MOST_OF_BATCH].float().cpu() for part in batch)
        mean, deviation = (torch.tensor(known[name]).view(-1, 1, 1) for name in ("mean", "std"))
        pixels = ((images * deviation + mean) * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
        names = known["class_names"]
        labels = [_label(target, names) for target in targets]
        self._first_batch = {"images": pixels.contiguous(), "labels": labels, "step": trainer.global_step}
        self._write_data(trainer, {"first_batch": self._first_batch})
        _show(trainer, "first batch", pixels, labels)

    # ---- what the model made of each image

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._kept, self._kept_score = self._best(trainer), _best_score(trainer)
            self._forget()

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._forget()

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.sanity_checking:
            return
        self._begun = True
        if dataloader_idx or not self._has_classes or not _is_classified(outputs, batch):
            return
        self._buffer.append((outputs.detach(), batch[1], getattr(_data(trainer), "batch_indices", None)))
        self._buffered += len(outputs)
        if self._buffered >= _BUFFER:
            self._try_to_judge()

    on_test_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            overfitting = trainer.overfit_batches > 0  # type: ignore[attr-defined]
            self._evaluated(trainer, pl_module, "train" if overfitting else "val")

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._evaluated(trainer, pl_module, "test")

    def _forget(self) -> None:
        self._buffer.clear()
        self._judged.clear()
        self._buffered = 0
        self._has_classes, self._num_classes = True, 0

    def _try_to_judge(self) -> None:
        if not _or_warn("The images could not be judged", self._judge):
            self._has_classes = False
        self._buffer.clear()
        self._buffered = 0

    def _judge(self) -> None:
        if self._buffer:
            logits, targets, positions = (list(column) for column in zip(*self._buffer, strict=True))
            outputs, classes = torch.cat(logits), torch.cat(targets)
            # checked here, once for many batches, as it waits for the device
            self._has_classes = bool(((classes >= 0) & (classes < outputs.shape[1])).all())
            if self._has_classes:
                known = None if None in positions else torch.cat(positions)
                self._judged.append(join([judge(outputs, classes, known)]))
                self._num_classes = outputs.shape[1]

    def _evaluated(self, trainer: L.Trainer, pl_module: L.LightningModule, split: str) -> None:
        self._try_to_judge()
        _or_warn("The images could not be judged", partial(self._keep_results, trainer, pl_module, split))
        self._forget()

    def _keep_results(self, trainer: L.Trainer, pl_module: L.LightningModule, split: str) -> None:
        parts = [(self._judged, self._has_classes, self._num_classes)]
        if trainer.world_size > 1:  # whatever this process found: the others wait for it
            parts *= trainer.world_size
            torch.distributed.all_gather_object(parts, parts[0])
        found = [results for judged, _, _ in parts for results in judged]
        if not found or not all(has_classes for _, has_classes, _ in parts):
            return
        names = getattr(pl_module, "class_names", None) or getattr(_data(trainer), "class_names", None)
        self._latest = {
            "results": join(found)._asdict(),
            "class_names": list(names or map(str, range(max(number for _, _, number in parts)))),
            "split": split,
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
        }

    # ---- which evaluation counts

    def _best(self, trainer: L.Trainer) -> dict[str, Any] | None:
        """What is known of the images from the evaluation that the best checkpoint, as it now is, comes from.

        Nothing is decided when an evaluation ends: the best checkpoint is chosen later, and taken back if it cannot be
        written.
        """
        score = _best_score(trainer)
        is_better = score is not None and score != self._kept_score
        return self._latest if is_better and self._latest is not None else self._kept

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[CHECKPOINT_KEY] = self._best(trainer)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":
            self._kept = checkpoint.get(CHECKPOINT_KEY)

    # ---- the end

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._finish(trainer, describe(exception))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._finish(trainer, None)

    def _finish(self, trainer: L.Trainer, exit_reason: str | None) -> None:
        # before the first batch there is nothing to tell
        if self._done or not self._begun or not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._done = True
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RunRecord):  # the report tells how the run ended
                callback.end(trainer, exit_reason or "finished")
        _or_warn("report.html could not be made", partial(self._report, trainer))

    def _report(self, trainer: L.Trainer) -> None:
        best = self._best(trainer)
        chosen = best or self._latest
        data = {"first_batch": self._first_batch} if self._first_batch else {}
        if chosen is not None:
            data |= chosen | {"best": best is not None, "worst": _worst(trainer, chosen)}
        if data:
            self._write_data(trainer, data)
        if chosen is not None:
            _or_warn("The mistakes could not be logged", partial(_log, trainer, data))
        folder = Path(trainer.default_root_dir)
        if find_spec("matplotlib") is None:
            rank_zero_info(
                "There is no report.html, as matplotlib is not installed. To have it: pip install matplotlib && "
                f"python -m lit_project.cli report {folder}"
            )
            return
        write_report(folder)

    def _write_data(self, trainer: L.Trainer, data: dict[str, Any]) -> None:
        path = Path(trainer.default_root_dir) / DATA_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, partial(torch.save, data))


def _best_score(trainer: L.Trainer) -> float | None:
    best = best_checkpoint(trainer)
    return best.best_model_score.item() if best and best.monitor and best.best_model_score is not None else None


def _worst(trainer: L.Trainer, data: dict[str, Any]) -> dict[str, Any]:
    """The gravest mistakes: ``indices`` into the results, and, where the data has them, ``images`` and ``paths``."""
    results = Results(**data["results"])
    indices = results.worst(_MOST_MISTAKES)
    found: dict[str, Any] = {"indices": indices}
    positions = results.positions[indices].long()
    splits = getattr(_data(trainer), "splits", {})
    if data["split"] in splits and bool((positions >= 0).all()):
        arrays = splits[data["split"]]
        found["images"] = arrays.select(positions.to(arrays.targets.device)).images.cpu().contiguous()
        if hasattr(_data(trainer), "paths"):
            paths = _data(trainer).paths(data["split"])
            found["paths"] = [str(paths[position]) for position in positions.tolist()]
    return found


# ---- loggers


def _log(trainer: L.Trainer, data: dict[str, Any]) -> None:
    results, names, worst = Results(**data["results"]), data["class_names"], data["worst"]
    if find_spec("matplotlib") is not None:
        drawn = figures.confusion_matrix(results.confusion_matrix(len(names)), names)
        _show(trainer, "confusion matrix", torch.from_numpy(figures.pixels(drawn).copy())[None])
    if len(worst.get("images", ())):
        captions = [caption(names, results, index) for index in worst["indices"].tolist()]
        _show(trainer, "worst mistakes", worst["images"], captions)


def _show(trainer: L.Trainer, name: str, images: Tensor, captions: Sequence[str] | None = None) -> None:
    """Give pictures, uint8 ``[N, H, W, C]``, to the loggers that take any: TensorBoard as one, others one by one."""
    pictures = list(images.numpy())
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            sheet = figures.contact_sheet(pictures, captions) if captions is not None else pictures[0]
            logger.experiment.add_image(name, sheet, trainer.global_step, dataformats="HWC")
        elif hasattr(logger, "log_image"):
            more = {"caption": [text.replace("\n", ", ") for text in captions]} if captions is not None else {}
            logger.log_image(name, [figures.picture_of(picture) for picture in pictures], trainer.global_step, **more)


# ---- internals


def _or_warn(what: str, action: Callable[[], object]) -> bool:
    """Whether an action succeeds: a picture is never worth a run."""
    try:
        action()
    except Exception as error:
        rank_zero_warn(f"{what}: {type(error).__name__}: {error}")
        return False
    return True


def _data(trainer: L.Trainer) -> Any:
    return getattr(trainer, "datamodule", None)


def _is_classified(outputs: Any, batch: Any) -> bool:
    """Whether what a step returns are logits ``[B, num_classes]``, for a batch of images and classes ``[B]``."""
    targets = batch[1] if _is_pair(batch) else None
    return (
        isinstance(outputs, Tensor)
        and isinstance(targets, Tensor)
        and outputs.ndim == 2
        and outputs.shape[1] > 1
        and targets.shape == outputs.shape[:1]
        and not targets.is_floating_point()
    )


def _is_pair(batch: Any) -> bool:
    """Whether a batch is images ``[B, C, H, W]`` and targets."""
    return (
        isinstance(batch, tuple | list)
        and len(batch) == 2
        and all(isinstance(part, Tensor) for part in batch)
        and batch[0].ndim == 4
    )


def _label(target: Tensor, names: Sequence[str]) -> str:
    """The class of an image, the two that it is mixed of, or each of its labels."""
    if target.ndim == 0:
        return names[int(target)]
    if target.max() == 1 or abs(target.sum().item() - 1) > 0.01:  # no shares of a whole
        return ", ".join(names[number] for number in target.nonzero().flatten().tolist()) or "no label"
    shares, classes = target.topk(2)
    mixed = zip(shares.tolist(), classes.tolist(), strict=True)
    return " and ".join(f"{names[number]} {share:.0%}" for share, number in mixed if share > 0)

"""Data sets, each a LightningDataModule with the same batches; see ``base.py`` for what they share."""

from lit_project.data.base import ImageDataModule
from lit_project.data.batches import Arrays
from lit_project.data.cifar10 import CIFAR10
from lit_project.data.image_folder import ImageFolder
from lit_project.data.predict import ImagesToPredict
from lit_project.data.shapes import Shapes10

__all__ = ["CIFAR10", "Arrays", "ImageDataModule", "ImageFolder", "ImagesToPredict", "Shapes10"]

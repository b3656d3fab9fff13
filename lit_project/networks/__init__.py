"""Networks: plain torch modules from images to logits, one family a file.

A network is any ``nn.Module`` that maps float images ``[batch, channels, height, width]`` to logits
``[batch, num_classes]``. A new one needs no registration here: its class path in a config is enough.
"""

from lit_project.networks.resnet import ResNet18
from lit_project.networks.simple_cnn import SimpleCNN
from lit_project.networks.timm_model import timm_model
from lit_project.networks.whitened_cnn import WhitenedCNN

__all__ = ["ResNet18", "SimpleCNN", "WhitenedCNN", "timm_model"]

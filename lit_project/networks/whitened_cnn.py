"""A small convolutional network that learns 32x32 photographs in a few epochs."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two 3x3 convolutions, the first followed by a max-pool that halves height and width.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, out_channels)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = _conv(out_channels, out_channels)
        self.norm2 = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, in_channels, height, width]`` to ``[batch, out_channels, height // 2, width // 2]``."""
        # pooled at once, so that all that follows has a quarter of the pixels to work on
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


class WhitenedCNN(nn.Module):
    """Whitened patches, then three blocks of two convolutions: 1,972,792 parameters for RGB images and 10 classes.

    ::

        whiten 2x2 (its filters are not trained) -> GELU
        [conv 3x3 -> max-pool 2 -> norm -> GELU -> conv 3x3 -> norm -> GELU] x 3
        maximum over height and width -> linear -> logits

    Made to be trained in few and large steps, such as those of :class:`lit_project.optimizers.MuonSGD`:

    * ``init_from_data`` makes the first layer's filters whiten the patches of the training images: the next layer
      starts from inputs that are uncorrelated and equally strong. Each filter comes with its negative, because GELU
      keeps only the positive half of a response. Without ``init_from_data`` the filters are random and orthogonal.
    * Each convolution starts with the identity on as many channels as it takes in.
    * Logits are scaled down, so that biases and the linear layer can share one learning rate.

    Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024 (https://arxiv.org/abs/2404.00498), whose
    networks this one follows, and which names the earlier work it builds on.

    Args:
        num_classes: number of classes, at least 2.
        in_channels: channels of an image: 3 for RGB, 1 for grey.
        widths: channels of the three blocks.

    Raises:
        ValueError: an argument is out of its range.
    """

    #: The smallest height and width: 8 pixels are left to halve three times after the first layer.
    min_image_size = 9

    def __init__(self, num_classes: int = 10, in_channels: int = 3, widths: Sequence[int] = (64, 256, 256)) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, got {num_classes}")
        if in_channels < 1:
            raise ValueError(f"in_channels must be at least 1, got {in_channels}")
        if len(widths) != 3 or min(widths) < 1:
            raise ValueError(f"widths must be three numbers, each at least 1, got {list(widths)}")

        self.in_channels = in_channels
        directions = in_channels * 2 * 2
        self.whiten = nn.Conv2d(in_channels, 2 * directions, kernel_size=2)
        self.whiten.weight.requires_grad_(False)
        self._set_filters(nn.init.orthogonal_(torch.empty(directions, directions)))
        channels = [2 * directions, *widths]
        self.blocks = nn.Sequential(*(Block(channels[i], channels[i + 1]) for i in range(3)))
        self.classifier = nn.Linear(widths[-1], num_classes, bias=False)
        nn.init.normal_(self.classifier.weight, std=0.25)

    @torch.no_grad()
    def init_from_data(self, images: Tensor) -> None:
        """Set the first layer to whiten the 2x2 patches of ``images``: their responses get the identity covariance.

        Call it once, before training, with the same images in every process; a trained network has its filters in its
        ``state_dict``.

        Args:
            images: float ``[N, in_channels, height, width]``, normalised as for training; a thousand will do.
        """
        patches = F.unfold(images.float(), kernel_size=2).transpose(1, 2).flatten(0, 1)
        variances, directions = torch.linalg.eigh(torch.cov(patches.T))
        # the floor keeps directions that hold next to nothing, such as those JPEG has dropped, from being blown up
        self._set_filters((directions / (variances + 5e-4).sqrt()).T)

    def _set_filters(self, filters: Tensor) -> None:
        with torch.no_grad():
            self.whiten.weight.copy_(torch.cat([filters, -filters]).view_as(self.whiten.weight))

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images.

        Args:
            images: float ``[batch, in_channels, height, width]``, normalised, at least 9x9 pixels.

        Returns:
            Float logits ``[batch, num_classes]``, unbounded.

        Raises:
            ValueError: the images have another number of dimensions or channels than the network was built for, or are
                too small.
        """
        if images.dim() != 4 or images.shape[1] != self.in_channels or min(images.shape[2:]) < self.min_image_size:
            raise ValueError(
                f"WhitenedCNN expects images of shape [batch, {self.in_channels}, height, width], at least "
                f"{self.min_image_size}x{self.min_image_size} pixels, got {list(images.shape)}: convert the images, or "
                f"build the network with their in_channels"
            )
        features = self.blocks(F.gelu(self.whiten(images)))
        logits: Tensor = self.classifier(features.amax(dim=(2, 3))) / 64
        return logits


def _conv(in_channels: int, out_channels: int) -> nn.Conv2d:
    """A 3x3 convolution without bias that passes on as many of its input channels as it can."""
    conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
    nn.init.dirac_(conv.weight.data[:in_channels])
    return conv

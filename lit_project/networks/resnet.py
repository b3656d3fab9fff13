"""The 18-layer residual network, with the stem that small images need."""

from torch import Tensor, nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut (figure 2 and section 3.3, option B, of the ResNet paper).

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        stride: 1 keeps height and width, 2 halves them.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, in_channels, height, width]`` to ``[batch, out_channels, height / stride, width / stride]``."""
        residual = F.relu(self.bn1(self.conv1(x)))
        residual = self.bn2(self.conv2(residual))
        return F.relu(residual + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for small images: 11,173,962 parameters for RGB images and 10 classes.

    The ImageNet network begins with a 7x7 convolution of stride 2 and a max-pool, which would leave 8x8 of a 32x32
    image. As in the paper's CIFAR-10 experiments (section 4.2), the stem is one 3x3 convolution of stride 1 instead.
    Four stages of two basic blocks follow, then the average over height and width: any image size will do.

    Sources: He et al., "Deep Residual Learning for Image Recognition", 2015 (https://arxiv.org/abs/1512.03385) for the
    network; He et al., "Delving Deep into Rectifiers", 2015 (https://arxiv.org/abs/1502.01852) for its initialisation.

    Args:
        num_classes: number of classes, at least 2.
        in_channels: channels of an image: 3 for RGB, 1 for grey.
        width: channels of the first stage; each further stage doubles them.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, width: int = 64) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, got {num_classes}")
        if in_channels < 1:
            raise ValueError(f"in_channels must be at least 1, got {in_channels}")
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")

        self.in_channels = in_channels
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
        self.stages = nn.Sequential(
            BasicBlock(width, width, stride=1),
            BasicBlock(width, width, stride=1),
            BasicBlock(width, 2 * width, stride=2),
            BasicBlock(2 * width, 2 * width, stride=1),
            BasicBlock(2 * width, 4 * width, stride=2),
            BasicBlock(4 * width, 4 * width, stride=1),
            BasicBlock(4 * width, 8 * width, stride=2),
            BasicBlock(8 * width, 8 * width, stride=1),
        )
        self.classifier = nn.Linear(8 * width, num_classes)

        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images.

        Args:
            images: float ``[batch, in_channels, height, width]``, normalised.

        Returns:
            Float logits ``[batch, num_classes]``, unbounded.

        Raises:
            ValueError: the images have another number of dimensions or channels than the network was built for.
        """
        if images.dim() != 4 or images.shape[1] != self.in_channels:
            raise ValueError(
                f"ResNet18 expects images of shape [batch, {self.in_channels}, height, width], "
                f"got {list(images.shape)}: convert the images, or build the network with their in_channels"
            )
        features: Tensor = self.stages(self.stem(images))
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits

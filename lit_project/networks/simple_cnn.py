"""A small convolutional network that learns 32x32 images on two CPU cores."""

from torch import Tensor, nn


class SimpleCNN(nn.Module):
    """Two convolution blocks and two linear layers: 2,122,378 parameters for 32x32 RGB images and 10 classes.

    ::

        [conv 3x3 -> batch norm -> ReLU -> max-pool 2] x 2 -> flatten -> linear 512 -> ReLU -> dropout -> linear

    Args:
        num_classes: number of classes, at least 2.
        in_channels: channels of an image: 3 for RGB, 1 for grey.
        image_size: height and width, at least 4 each; one number for square images. The first linear layer depends on
            it, so a trained network takes this one size.
        dropout: probability in [0, 1] of zeroing a feature of the last hidden layer while training.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int | list[int] | tuple[int, int] = 32,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        sides = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
        if len(sides) != 2 or min(sides) < 4:
            raise ValueError(
                f"SimpleCNN halves an image twice: image_size must be one number or [height, width], each at least 4, "
                f"got {image_size}"
            )
        if num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, got {num_classes}")
        if in_channels < 1:
            raise ValueError(f"in_channels must be at least 1, got {in_channels}")

        self.image_shape = (in_channels, *sides)
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 32, kernel_size=3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64 * (sides[0] // 4) * (sides[1] // 4), 512),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(512, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of images.

        Args:
            images: float ``[batch, in_channels, height, width]``, normalised.

        Returns:
            Float logits ``[batch, num_classes]``, unbounded.

        Raises:
            ValueError: the images have another shape than the network was built for.
        """
        # Without this check the message would be about two matrices, or there would be none: 33x33 pools to 8x8 too.
        if images.shape[1:] != self.image_shape:
            channels, height, width = self.image_shape
            raise ValueError(
                f"SimpleCNN expects images of shape [batch, {channels}, {height}, {width}], got {list(images.shape)}: "
                f"resize the images, or build the network with their in_channels and image_size"
            )
        logits: Tensor = self.classifier(self.features(images))
        return logits

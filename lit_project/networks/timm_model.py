"""Any network of the timm library, by name."""

import difflib

from torch import nn


def timm_model(name: str, num_classes: int = 10, in_channels: int = 3, pretrained: bool = False) -> nn.Module:
    """A network of timm, with this project's argument names.

    torchvision's networks need no such function: ``torchvision.models.resnet18`` is a class path already.

    Args:
        name: a name that ``timm.list_models()`` lists, with or without the tag of its weights: ``resnet18``,
            ``resnet18.a1_in1k``.
        num_classes: number of classes; pretrained networks get a new last layer.
        in_channels: channels of an image; pretrained first layers are adapted.
        pretrained: start from the published weights, downloaded once.

    Returns:
        A network from float images ``[batch, in_channels, height, width]`` to logits ``[batch, num_classes]``. Some
        (most transformers) take only the image size in their name.

    Raises:
        ImportError: timm is not installed.
        ValueError: timm knows no network of this name.

    Source: https://github.com/huggingface/pytorch-image-models
    """
    # Imported here: the other networks work without this optional dependency, and start faster.
    try:
        import timm
    except ImportError as error:
        raise ImportError(
            f"the network {name!r} needs timm: pip install timm (or this project's [timm] extra)"
        ) from error

    if not timm.is_model(name):
        nearest = difflib.get_close_matches(name.lower(), timm.list_models())
        hint = f"did you mean {', '.join(nearest)}?" if nearest else "timm.list_models() lists the names"
        raise ValueError(f"timm has no network named {name!r}: {hint}")
    network: nn.Module = timm.create_model(name, pretrained=pretrained, num_classes=num_classes, in_chans=in_channels)
    return network

"""Float models for the tests: one of every torchvision family, small, and the whole zoo without memory."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torchvision
from torch import nn
from torchvision.models import maxvit, swin_transformer
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.resnet import Bottleneck, ResNet

named = partial(torchvision.models.get_model, num_classes=10)


def small_head(name: str, features: int) -> nn.Module:
    """AlexNet or a VGG with its two wide layers made narrow."""
    with weightless():
        model = named(name)
    linear = [i for i, m in enumerate(model.classifier) if isinstance(m, nn.Linear)]
    model.classifier[linear[0]] = nn.Linear(features, 32, device="meta")
    model.classifier[linear[1]] = nn.Linear(32, 32, device="meta")
    model.classifier[linear[2]] = nn.Linear(32, 10, device="meta")
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def resnext() -> nn.Module:
    return ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10, groups=4, width_per_group=4)


def densenet() -> nn.Module:
    return torchvision.models.DenseNet(8, (2, 2), 16, drop_rate=0.1, num_classes=10)


def convnext() -> nn.Module:
    return ConvNeXt([CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 1)], stochastic_depth_prob=0.2, num_classes=10)


def vit() -> nn.Module:
    model = torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 64, dropout=0.1, num_classes=10)
    nn.init.normal_(model.heads.head.weight)  # torchvision starts it at zero
    return model


def swin(version: int) -> nn.Module:
    parts = {
        1: {},
        2: {
            "block": swin_transformer.SwinTransformerBlockV2,
            "downsample_layer": swin_transformer.PatchMergingV2,
        },
    }[version]
    return torchvision.models.SwinTransformer(
        [4, 4], 16, [1, 2], [2, 4], [4, 4], stochastic_depth_prob=0.2, num_classes=10, **parts
    )


def max_vit() -> nn.Module:
    return maxvit.MaxVit((32, 32), 8, 2, [8, 16], [1, 1], 8, 0.2, num_classes=10)


FAMILIES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "alexnet": (partial(small_head, "alexnet", 256 * 6 * 6), 64),
    "vgg": (partial(small_head, "vgg11_bn", 512 * 7 * 7), 32),
    "resnet": (partial(named, "resnet18"), 32),
    "resnext": (resnext, 32),
    "squeezenet": (partial(named, "squeezenet1_1"), 32),
    "densenet": (densenet, 32),
    "googlenet": (partial(named, "googlenet", init_weights=True), 32),
    "inception": (partial(named, "inception_v3", init_weights=True, aux_logits=False), 75),
    "mobilenet_v2": (partial(named, "mobilenet_v2"), 32),
    "mobilenet_v3": (partial(named, "mobilenet_v3_small"), 32),
    "shufflenet": (partial(named, "shufflenet_v2_x0_5"), 32),
    "mnasnet": (partial(named, "mnasnet0_5"), 32),
    "efficientnet": (partial(named, "efficientnet_b0"), 32),
    "efficientnet_v2": (partial(named, "efficientnet_v2_s"), 32),
    "convnext": (convnext, 32),
    "regnet": (partial(named, "regnet_y_400mf"), 32),
    "vit": (vit, 32),
    "swin": (partial(swin, 1), 32),
    "swin_v2": (partial(swin, 2), 32),
    "maxvit": (max_vit, 32),
}
"""A small model of each family, and the size of its images."""


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Build models whose parameters take no memory and no time. (`torch.device("meta")` stops RegNet.)"""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, p: nn.Parameter | None) -> None:
        register(self, name, None if p is None else nn.Parameter(p.to("meta"), p.requires_grad))

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register

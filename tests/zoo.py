"""Float models for the tests: one of every torchvision family, small."""

from collections.abc import Callable
from functools import partial

import torchvision
from torch import nn
from torchvision.models import maxvit, swin_transformer
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.efficientnet import FusedMBConvConfig, MBConvConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.regnet import BlockParams
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from qat.models import EmptyOnMeta

named = partial(torchvision.models.get_model, num_classes=10)


def small_head(name: str, features: int) -> nn.Module:
    """AlexNet or a VGG with its two wide layers made narrow."""
    with EmptyOnMeta():
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


def resnet() -> nn.Module:
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)


def resnext() -> nn.Module:
    return ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10, groups=4, width_per_group=4)


def densenet() -> nn.Module:
    return torchvision.models.DenseNet(8, (2, 2), 16, drop_rate=0.1, num_classes=10)


def mobilenet_v2() -> nn.Module:
    return torchvision.models.MobileNetV2(10, inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 1, 2]])


def mobilenet_v3() -> nn.Module:
    rows = [
        InvertedResidualConfig(16, 3, 16, 16, True, "RE", 2, 1, 1.0),
        InvertedResidualConfig(16, 5, 40, 24, True, "HS", 2, 1, 1.0),
        InvertedResidualConfig(24, 3, 40, 24, False, "HS", 1, 1, 1.0),
    ]
    return torchvision.models.MobileNetV3(rows, 64, num_classes=10)


def shufflenet() -> nn.Module:
    return torchvision.models.ShuffleNetV2([2, 2, 2], [24, 16, 32, 64, 64], num_classes=10)


def efficientnet(fused: bool) -> nn.Module:
    first = FusedMBConvConfig(2, 3, 1, 32, 16, 1) if fused else MBConvConfig(1, 3, 1, 32, 16, 1, 1.0, 1.0)
    rows = [first, MBConvConfig(4, 3, 2, 16, 24, 2, 1.0, 1.0), MBConvConfig(4, 5, 2, 24, 24, 1, 1.0, 1.0)]
    return torchvision.models.EfficientNet(rows, dropout=0.2, num_classes=10, last_channel=64)


def regnet() -> nn.Module:
    parameters = BlockParams.from_init_params(4, w_0=16, w_a=8, w_m=2, group_width=8, se_ratio=0.25)
    return torchvision.models.RegNet(parameters, num_classes=10)


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
    "resnet": (resnet, 32),
    "resnext": (resnext, 32),
    "squeezenet": (partial(named, "squeezenet1_1"), 32),
    "densenet": (densenet, 32),
    "googlenet": (partial(named, "googlenet", init_weights=True), 32),
    "inception": (partial(named, "inception_v3", init_weights=True, aux_logits=False), 75),
    "mobilenet_v2": (mobilenet_v2, 32),
    "mobilenet_v3": (mobilenet_v3, 32),
    "shufflenet": (shufflenet, 32),
    "mnasnet": (partial(torchvision.models.MNASNet, 0.1, 10), 32),
    "efficientnet": (partial(efficientnet, False), 32),
    "efficientnet_v2": (partial(efficientnet, True), 32),
    "convnext": (convnext, 32),
    "regnet": (regnet, 32),
    "vit": (vit, 32),
    "swin": (partial(swin, 1), 32),
    "swin_v2": (partial(swin, 2), 32),
    "maxvit": (max_vit, 32),
}
"""A small model of each family, and the size of its images."""

FULL = (
    "resnet18",
    "densenet121",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "shufflenet_v2_x0_5",
    "mnasnet0_5",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "convnext_tiny",
    "regnet_y_400mf",
    "swin_t",
)
"""Some as torchvision builds them, that take images of 32x32."""
FAMILIES |= {name: (partial(named, name), 32) for name in FULL}
SLOW = {"inception", *FULL}

"""What every quantizer shares: its state, its code range, calibration, and staying in step with what was loaded."""

from __future__ import annotations

import math
import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qat import kernels
from qat.config import QatError
from qat.quantizers.initial import initial_scale
from qat.quantizers.observer import Observer


class Quantizer(nn.Module):
    """Owns the scale of one tensor and fake-quantizes it.

    All state has its final shape from construction on, so optimizers, DDP and checkpoints may come before calibration:
    `scale` (raw float32 Parameter, (1,) or (channels,); read it through `step`), and the buffers `signed`, `zero_point`
    and `calibrated`, which Python attributes mirror so that a forward never waits for the device.

    Args:
        bits: 1 to 8.
        weight: True for a layer's weight (signed, codes symmetric from 3 bits on), False for an activation (signed or
            unsigned as calibration finds).
        channels: number of scales.
        axis: the channel dimension; None for one scale per tensor.
        init: `lsq`, `minmax`, `percentile` or `mse`; None for the method's own choice.
        learn: whether the scale is trained.
        name: dotted name, for messages.
    """

    method: ClassVar[str]
    integer: ClassVar[bool] = True  # has codes on one uniform grid, so it can be deployed on integers
    deterministic: ClassVar[bool] = True
    paper: ClassVar[str]

    scale: nn.Parameter
    signed: Tensor
    zero_point: Tensor
    calibrated: Tensor

    def __init__(
        self,
        bits: int,
        *,
        weight: bool,
        channels: int = 1,
        axis: int | None = None,
        init: str | None = None,
        learn: bool = True,
        name: str = "",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.bits, self.weight, self.axis, self.init, self.name = bits, weight, axis, init, name
        self.enabled = True
        self.observer: Observer | None = None
        self.scale = nn.Parameter(torch.ones(channels, device=device), requires_grad=learn)
        self.register_buffer("signed", torch.tensor([weight], device=device))
        self.register_buffer("zero_point", torch.zeros(1, dtype=torch.int32, device=device))
        self.register_buffer("calibrated", torch.zeros(1, dtype=torch.bool, device=device))
        self.is_signed, self.is_calibrated = weight, False

    # --- the grid -----------------------------------------------------------------------------------------------------

    @property
    def qmin(self) -> int:
        """Least code."""
        if not self.is_signed:
            return 0
        # Symmetric weights lose one code of 2^bits; at 2 bits that would be one of four, so there it is kept.
        return -(2 ** (self.bits - 1)) + (1 if self.weight and self.bits > 2 else 0)

    @property
    def qmax(self) -> int:
        """Largest code."""
        return 2 ** (self.bits - 1) - 1 if self.is_signed else 2**self.bits - 1

    @property
    def step(self) -> Tensor:
        """Scale as used: positive, float32, detached."""
        return kernels.positive(self.scale.detach())

    def encode(self, x: Tensor) -> Tensor:
        """Codes of x, as int8 (signed) or uint8.

        Raises:
            QatError: x has NaN, which no integer can hold.
        """
        codes, _ = kernels.encode(x.detach(), self.step, self.qmin, self.qmax, self.axis)
        if codes.isnan().any():
            raise QatError(f"{self.name or self.method}: cannot encode NaN as an integer code")
        return codes.to(torch.int8 if self.is_signed else torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Values of codes, float32."""
        return kernels.decode(codes, self.step, self.axis)

    def set_bits(self, bits: int) -> None:
        """Change the code range; the scale is the caller's to change.

        Raises:
            QatError: bits that this method does not have.
        """
        if bits == 1 and self.is_signed:
            raise QatError(f"{self.name}: {self.method} has no 1-bit signed form")
        self.bits = bits

    # --- forward ------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """Fake-quantize x; with an observer attached, or disabled, return x itself."""
        if self.observer is not None:
            self.observe(x)
            return x
        if not self.enabled:
            return x
        if not self.is_calibrated:
            raise QatError(f"{self.name or 'quantizer'} has no scale yet: run qat.calibrate(model, batches) first")
        return self.quantize(x)

    def quantize(self, x: Tensor) -> Tensor:
        """Values of x, through the method's Function."""
        raise NotImplementedError

    def gain(self, x: Tensor) -> float:
        """LSQ's gradient scale, 1 / sqrt(N * qmax) (section 2.2).

        N counts the weights that share one scale, or the features of one sample. It leaves the batch out, as the paper
        does: the loss is a mean over the batch, so a scale then learns alike at every batch size.
        """
        n = x.numel() // self.scale.numel() if self.weight else math.prod(x.shape[1:])
        return 1 / math.sqrt(max(n, 1) * self.qmax)

    # --- calibration --------------------------------------------------------------------------------------------------

    def default_init(self) -> str:
        """The method's own initial scale."""
        return "mse"

    def observe(self, x: Tensor) -> None:
        """Add x to the calibration statistics."""
        assert self.observer is not None
        try:
            self.observer.update(x)
        except QatError as error:
            raise QatError(f"{self.name}: {error} (look for NaN or inf in the input or the weights)") from None

    @torch.no_grad()
    def calibrate(self, x: Tensor | Observer) -> None:
        """Set the scale from a weight, or signedness and scale from an activation's statistics. In place.

        Raises:
            QatError: the tensor has NaN or infinite values, or nothing was observed.
        """
        if isinstance(x, Observer):
            if x.total == 0:
                raise QatError(f"{self.name}: no calibration data reached it")
            self.signed.fill_(x.minimum < 0)
            self.is_signed = x.minimum < 0
            values, counts = x.samples()
        else:
            rows = x.detach().float()
            rows = rows.reshape(1, -1) if self.axis is None else rows.movedim(self.axis, 0).flatten(1)
            if not rows.isfinite().all():
                raise QatError(f"{self.name}: the weight has NaN or infinite values")
            values, counts = rows, None
        scale = initial_scale(self.init or self.default_init(), values, counts, self.qmin, self.qmax)
        dead = scale <= 0
        if dead.any():
            # An all-zero tensor or channel: any step is exact. Its neighbours' mean lets it come alive with training.
            scale[dead] = scale[~dead].mean() if not dead.all() else 1 / self.qmax
            if dead.all():
                warnings.warn(f"{self.name}: only zeros seen; its scale is a guess", stacklevel=2)
        self.scale.copy_(scale.clamp_min(kernels.SCALE_FLOOR).to(self.scale.device))
        self.calibrated.fill_(True)
        self.is_calibrated = True

    # --- staying in step ----------------------------------------------------------------------------------------------

    def mirror(self) -> None:
        """Refresh the Python attributes from the buffers."""
        if not self.signed.is_meta:
            self.is_signed, self.is_calibrated = bool(self.signed.item()), bool(self.calibrated.item())

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.mirror()

    def _apply(self, fn: Any, recurse: bool = True) -> Quantizer:
        before = self.scale.detach()
        super()._apply(fn, recurse)
        if self.scale.dtype != torch.float32:  # model.half() and the like: scales stay float32, unrounded
            self.scale.data = before.to(self.scale.device)
        return self

    def extra_repr(self) -> str:
        """One line: method, bits, range, granularity."""
        sharing = "per tensor" if self.axis is None else f"per channel ({self.scale.numel()})"
        state = "" if self.is_calibrated else ", not calibrated"
        return f"{self.method}, bits={self.bits}, codes {self.qmin}..{self.qmax}, {sharing}{state}"

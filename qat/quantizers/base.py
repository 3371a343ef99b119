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
    the raw Parameter (`scale`, unless the method learns something else; float32, one element per scale; read it through
    `step`), and the buffers `signed`, `zero_point` and `calibrated`, which Python attributes mirror so that a forward
    never waits for the device.

    A method is a subclass. It declares the class variables below and defines `quantize`; where it learns something
    other than a scale, also `step` and `raw_of`; where its codes are its own, `codes`.

    Args:
        bits: 1 to 8.
        weight: True for a layer's weight (signed, codes symmetric from 3 bits on), False for an activation (signed or
            unsigned as calibration finds).
        channels: number of scales.
        axis: the channel dimension; None for one scale per tensor.
        group: consecutive weights that share a scale, in place of a channel; None for `axis`.
        init: `lsq`, `minmax`, `percentile` or `mse`; None for the method's own choice.
        learn: whether the scale is trained.
        name: dotted name, for messages.
    """

    method: ClassVar[str]
    paper: ClassVar[str]
    allowed_bits: ClassVar[range] = range(2, 9)
    deterministic: ClassVar[bool] = True  # the same codes each time: may be computed again, or cached
    learns: ClassVar[bool] = True  # a scale, offset or threshold
    per_tensor: ClassVar[bool] = False  # has one scale by definition
    keeps_range: ClassVar[bool] = False  # its Parameter is the end of the range, which stays when the bits change
    decays: ClassVar[bool] = False  # whether weight decay acts on what it learns
    parameter: ClassVar[str] = "scale"  # name of the raw Parameter

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
        group: int | None = None,
        init: str | None = None,
        learn: bool = True,
        name: str = "",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.bits, self.weight, self.axis, self.group, self.init, self.name = bits, weight, axis, group, init, name
        self.enabled = True
        self.observer: Observer | None = None
        raw = nn.Parameter(torch.ones(channels, device=device), requires_grad=learn and self.learns)
        self.register_parameter(self.parameter, raw)
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
    def raw(self) -> nn.Parameter:
        """The Parameter that the scale comes from."""
        parameter: nn.Parameter = getattr(self, self.parameter)
        return parameter

    @property
    def step(self) -> Tensor:
        """Scale as used: positive, float32, detached."""
        return kernels.positive(self.raw.detach())

    def raw_of(self, step: Tensor) -> Tensor:
        """The value of the raw Parameter that makes `step` the scale as used."""
        return step

    @property
    def integer(self) -> bool:
        """Whether the values lie on one uniform grid of integer codes per channel, so that they deploy on integers."""
        return self.group is None

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """Codes of x, as int8 or, where none is negative, uint8: what is deployed.

        Raises:
            QatError: x has NaN, which no integer can hold, or the method has no integer codes.
        """
        if not self.integer:
            raise QatError(f"{self.name or self.method}: {self.method} has no integer codes here; it deploys as float")
        codes = self.codes(x.detach())
        if codes.isnan().any():
            raise QatError(f"{self.name or self.method}: cannot encode NaN as an integer code")
        return codes.to(torch.int8 if self.qmin < 0 else torch.uint8)

    def codes(self, x: Tensor) -> Tensor:
        """Codes of x as float32; NaN stays NaN."""
        return kernels.encode(x, self.step, self.qmin, self.qmax, self.axis)[0]

    def decode(self, codes: Tensor) -> Tensor:
        """Values of codes, float32."""
        return kernels.decode(codes.float() - self.zero_point, self.step, self.axis)

    def set_bits(self, bits: int) -> None:
        """Change the code range, in place; the scale follows as LSQ's initial step does, by 1 / sqrt(qmax).

        Methods that learn the end of their range keep that instead (`keeps_range`).

        Raises:
            QatError: bits that this method does not have.
        """
        if bits not in self.allowed_bits:
            raise QatError(f"{self.name}: {self.method} has {spell(self.allowed_bits)} bits; got {bits}")
        step, before = self.step, self.qmax
        self.bits = bits
        if not self.keeps_range:
            self.set_step(step * math.sqrt(before / self.qmax))

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
        if self.group is not None:
            return self.quantize(x.reshape(-1, self.group)).reshape(x.shape)
        return self.quantize(x)

    def quantize(self, x: Tensor) -> Tensor:
        """Values of x, through the method's Function."""
        raise NotImplementedError

    def gain(self, x: Tensor) -> float:
        """LSQ's gradient scale, 1 / sqrt(N * qmax) (section 2.2).

        N counts the weights that share one scale, or the features of one sample. It leaves the batch out, as the paper
        does: the loss is a mean over the batch, so a scale then learns alike at every batch size.
        """
        if torch.jit.is_tracing() or torch.compiler.is_exporting():
            return 1.0  # nothing learns there, and sizes read here would become constants of the graph
        n = x.numel() // self.raw.numel() if self.weight else math.prod(x.shape[1:])
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
            before, self.is_signed = self.is_signed, x.minimum < 0
            if self.qmax < 1:
                self.is_signed = before
                raise QatError(
                    f"{self.name}: {self.method} has no signed codes of 1 bit, and this tensor has negative values "
                    "(give it 2 bits, or the method binary, by a rule)"
                )
            self.signed.fill_(self.is_signed)
            values, counts = x.samples()
        else:
            rows = x.detach().float()
            if self.group is not None:
                rows = rows.reshape(-1, self.group)
            else:
                rows = rows.reshape(1, -1) if self.axis is None else rows.movedim(self.axis, 0).flatten(1)
            if not rows.isfinite().all():
                raise QatError(f"{self.name}: the weight has NaN or infinite values")
            values, counts = rows, None
        step = self.initial_step(values, counts)
        dead = step <= 0
        if dead.any():
            # An all-zero tensor or channel: any step is exact. Its neighbours' mean lets it come alive with training.
            step[dead] = step[~dead].mean() if not dead.all() else 1 / self.qmax
            if dead.all():
                warnings.warn(f"{self.name}: only zeros seen; its scale is a guess", stacklevel=2)
        self.set_step(step)
        self.calibrated.fill_(True)
        self.is_calibrated = True

    def initial_step(self, values: Tensor, counts: Tensor | None) -> Tensor:
        """First scale as used; arguments as for `initial_scale`. Zero where there are only zeros."""
        return initial_scale(self.init or self.default_init(), values, counts, self.qmin, self.qmax)

    @torch.no_grad()
    def set_step(self, step: Tensor) -> None:
        """Make `step` the scale as used, in place."""
        self.raw.copy_(self.raw_of(step.clamp_min(kernels.SCALE_FLOOR).to(self.raw.device)))

    # --- staying in step ----------------------------------------------------------------------------------------------

    def mirror(self) -> None:
        """Refresh the Python attributes from the buffers."""
        if not self.signed.is_meta:
            self.is_signed, self.is_calibrated = bool(self.signed.item()), bool(self.calibrated.item())

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.mirror()

    def _apply(self, fn: Any, recurse: bool = True) -> Quantizer:
        before = {name: p.detach() for name, p in self.named_parameters(recurse=False)}
        super()._apply(fn, recurse)
        for name, p in self.named_parameters(recurse=False):
            if p.dtype != torch.float32:  # model.half() and the like: scales stay float32, unrounded
                p.data = before[name].to(p.device)
        return self

    def extra_repr(self) -> str:
        """One line: method, bits, range, granularity."""
        sharing = "per tensor" if self.axis is None else f"per channel ({self.raw.numel()})"
        sharing = sharing if self.group is None else f"per group of {self.group}"
        state = "" if self.is_calibrated else ", not calibrated"
        return f"{self.method}, bits={self.bits}, codes {self.qmin}..{self.qmax}, {sharing}{state}"


def spell(bits: range) -> str:
    """`2 to 8`, or `1`."""
    return f"{bits[0]}" if len(bits) == 1 else f"{bits[0]} to {bits[-1]}"

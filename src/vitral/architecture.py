"""Model architectures as plain data, shared by models, costs, weight files and model cards. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from vitral.errors import UserError, shorten
from vitral.validation import check_fields, check_value

Size = tuple[int, int]  # (height, width), in pixels or in patches

Pool = Literal["token", "mean", "map", "token+mean", "token+register"]
Position = Literal["none", "1d", "2d", "relative", "bias", "sincos2d"]
Injection = Literal["input", "every", "shared"]
Gelu = Literal["tanh", "erf", "quick"]
ResizeRule = Literal["google", "timm", "hf", "torchvision", "dino", "siglip", "linear", "naflex-par", "naflex-parfac"]
NormPlace = Literal["tokens", "features", "none"]
RootPool = Literal["zero", "-inf"]
# Of weight standardization and GroupNorm in a ResNet. timm and transformers changed those of Google's code:
#   stem of a hybrid  google: (w - mean) / (std + 1e-5), GroupNorm 1e-6  timm: (w - mean) / sqrt(var + 1e-8), 1e-5
#   BiT               google: (w - mean) / sqrt(var + 1e-10), 1e-5       timm: (w - mean) / sqrt(var + 1e-8), 1e-5
Epsilons = Literal["google", "timm"]

_DEEPEST = 1000  # blocks of a model or of a stage, each of which is built as Python objects

AXIAL_HEADS = 8  # of an AxialResNet of any width, as in Axial-DeepLab


@dataclass(frozen=True, kw_only=True)
class StemConfig:
    """The ResNet (v1, post-activation) in front of a hybrid's patch embedding (paper, section 3.1)."""

    blocks: tuple[int, ...]  # bottlenecks of each stage; () is the root alone (7x7 convolution and max-pool)
    width: int = 1  # a multiple of 64 channels
    epsilons: Epsilons = "google"

    def __post_init__(self) -> None:
        check_fields(self)
        _check_depth("blocks", *self.blocks)
        if len(self.blocks) > 8:
            raise UserError(f"a stem has at most 8 stages, not {len(self.blocks)}.")
        _check_positive(self, "width")

    @property
    def channels(self) -> int:
        """Channels of the output feature map."""
        return 64 * self.width * (4 * 2 ** (len(self.blocks) - 1) if self.blocks else 1)

    @property
    def stride(self) -> int:
        """Image pixels per pixel of the feature map: the root halves twice, every stage but the first once."""
        return 2 ** (1 + max(len(self.blocks), 1))

    def grid(self, image: Size) -> Size:
        """Height and width of the feature map for an image size: TensorFlow's SAME padding rounds up."""
        return -(-image[0] // self.stride), -(-image[1] // self.stride)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embeddings: queries and keys are rotated, by angles that grow with a patch's coordinates.

    Half of the channel pairs of a head turn with each of the two coordinates, at frequencies temperature^-(i/n).
    """

    temperature: float = 100.0
    pairs: Literal["adjacent", "halves"] = "halves"  # channels 2i and 2i + 1 (EVA), or i and i + dim/2 (DINOv3)
    # The row and column, 0, 1, 2, ... (EVA), or 2 pi times the patch's center, from -1 to 1 (DINOv3).
    coordinates: Literal["index", "center"] = "center"
    axes: Literal["yx", "xy"] = "yx"  # the coordinate of the first pairs, then that of the others
    offset: float = 0.0  # added to an index
    reference: Size | None = None  # indices are scaled to this grid, that of the pre-training
    learned: bool = False  # each head of each block learns its frequencies for both coordinates ("mixed" RoPE)
    # DINOv3's own code rounds the periods to bfloat16 where its weights are; timm and transformers do not.
    periods: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.temperature <= 0:
            raise UserError(f"temperature must be above 0, not {self.temperature}.")


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """A Vision Transformer, its hybrids (`stem`) and its axial variant (`axial`)."""

    depth: int
    width: int
    mlp: int
    heads: int
    patch: int  # side of a square patch, in pixels of the image or of the stem's feature map
    image: Size = (224, 224)  # sets the grid of the position table; any other size works at run time
    channels: int = 3
    classes: int = 1000  # 0: no head, the model returns its features
    pool: Pool = "token"
    class_token: bool = True
    registers: int = 0
    position: Position = "1d"
    injection: Injection = "input"
    class_position: bool = True  # the class token has its own position row (Google: yes, big_vision: no)
    resize: ResizeRule = "google"
    representation: int = 0  # width of the tanh layer of the pre-training head; 0: none
    # The final LayerNorm comes before pooling (the paper) or after it (MAE's fine-tuning); some encoders have none.
    norm_place: NormPlace = "tokens"
    norm_eps: float = 1e-6
    gelu: Gelu = "tanh"
    layer_scale: bool = False
    # What later Vision Transformers changed; the defaults are the paper's.
    rope: RopeConfig | None = None  # besides `position`
    swiglu: bool = False  # MLP of silu(gate) * value; `mlp` is the width of each
    qkv_bias: bool = True
    key_bias: bool = True  # False: only queries and values have a bias (BEiT, EVA, DINOv3)
    patch_bias: bool = True
    head_bias: bool = True
    qk_norm: bool = False  # LayerNorm of every head's queries and keys
    pre_norm: bool = False  # LayerNorm before the first block (CLIP)
    post_norm: bool = False  # z' = LN(MSA(z)) + z instead of MSA(LN(z)) + z
    attention_norm: bool = False  # LayerNorm before the attention's output projection (EVA-02, BEiT-3)
    mlp_norm: bool = False  # LayerNorm before the MLP's second layer
    map_heads: int = 0  # of pool="map"; 0: as many as the blocks have
    map_mlp: int = 0  # of pool="map"; 0: as wide as that of the blocks
    map_prefix: bool = False  # pool="map" reads class token and registers, too
    stem: StemConfig | None = None
    axial: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    stochastic_depth: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        _check_positive(self, "depth", "width", "mlp", "heads", "patch", "channels")
        _check_depth("depth", self.depth)
        if not all(0 <= share < 1 for share in (self.dropout, self.attention_dropout, self.stochastic_depth)):
            raise UserError("dropout, attention_dropout and stochastic_depth must be from 0 to below 1.")
        if self.norm_eps <= 0:
            raise UserError(f"norm_eps must be above 0, not {self.norm_eps}.")
        if self.width % self.heads:
            raise UserError(f"{self.heads} heads do not divide a width of {self.width}: choose a divisor.")
        if self.pool == "token" and not self.class_token:
            raise UserError('pool="token" needs a class token: set class_token=True or pool="mean".')
        if self.position == "sincos2d" and self.width % 4:
            raise UserError(f'position="sincos2d" needs a width that 4 divides, not {self.width}.')
        if self.position == "2d" and self.width % 2:
            raise UserError(f'position="2d" needs an even width, not {self.width}.')
        if self.injection != "input" and self.position in ("none", "relative", "bias"):
            raise UserError(f'position="{self.position}" is not added to tokens: leave injection at "input".')
        self._check_parts()
        if self.axial and (self.prefix or self.position in ("relative", "bias") or self.rope):
            raise UserError(
                "axial attention works on a grid: set class_token=False, registers=0 and a position that is added."
            )
        self.grid(self.image)

    def _check_parts(self) -> None:
        if self.rope and self.width // self.heads % 4:
            raise UserError(f"RoPE needs heads whose width 4 divides, not {self.width // self.heads}.")
        if self.pool == "token+mean" and not self.class_token:
            raise UserError('pool="token+mean" needs a class token: set class_token=True or pool="mean".')
        if self.pool == "token+register" and not (self.class_token and self.registers == 1):
            raise UserError('pool="token+register" needs a class token and one register, the distillation token.')
        if self.post_norm and self.layer_scale:
            raise UserError("post_norm=True has no LayerScale: its norms scale the branches already.")
        if self.swiglu and self.gelu == "quick":
            raise UserError('swiglu=True has no GELU in its blocks: leave gelu at "tanh" or "erf".')
        if self.pool == "map" and self.width % (self.map_heads or self.heads):
            raise UserError(f"{self.map_heads} heads do not divide a width of {self.width}: choose a divisor.")

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches: the class token, then the registers."""
        return int(self.class_token) + self.registers

    @property
    def class_row(self) -> bool:
        """Whether the position table holds a row for the class token."""
        return self.class_token and self.class_position and self.position in ("1d", "2d")

    @property
    def features(self) -> int:
        """Width of the pooled features."""
        return 2 * self.width if self.pool.startswith("token+") else self.width

    @property
    def stride(self) -> int:
        """Image pixels per side of a patch, the stride of a hybrid's stem included."""
        return self.patch * (self.stem.stride if self.stem else 1)

    def grid(self, image: Size) -> Size:
        """Rows and columns of patches; pixels at the right and bottom that fill no patch are dropped, as by Google."""
        height, width = self.stem.grid(image) if self.stem else image
        if height < self.patch or width < self.patch:  # not min(): a symbolic size has no order
            raise UserError(
                f"an image of {image[0]}x{image[1]} pixels is smaller than one patch: "
                f"make each side at least {self._smallest_side()} pixels."
            )
        return height // self.patch, width // self.patch

    def _smallest_side(self) -> int:
        return (self.patch - 1) * self.stem.stride + 1 if self.stem else self.patch

    def tokens(self, image: Size) -> int:
        """Length of the token sequence for an image size."""
        rows, columns = self.grid(image)
        return self.prefix + rows * columns


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """BiT's ResNetV2: pre-activation, GroupNorm, weight standardization; `axial` has attention for 3x3 convolutions."""

    blocks: tuple[int, int, int, int]  # bottlenecks of each stage
    width: int = 1  # a multiple of 64 channels
    image: Size = (224, 224)  # sets the offset tables of the axial variant; plain ResNets have none
    channels: int = 3
    classes: int = 1000
    root_pool: RootPool = "zero"  # big_transfer pads the first max-pool with zeros, big_vision with minus infinity
    epsilons: Epsilons = "google"
    axial: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        _check_positive(self, "width", "channels")
        _check_depth("blocks", *self.blocks)
        self.grid(self.image)

    @property
    def stride(self) -> int:
        """Image pixels per side of a pixel of the last feature map."""
        return 32

    @property
    def features(self) -> int:
        """Width of the pooled features, the channels of the last stage."""
        return 2048 * self.width

    def stage_grid(self, image: Size, stage: int) -> Size:
        """Height and width of the feature map after stage 0..3 (stage -1: after the root)."""
        height, width = image
        for _ in range(2 + max(stage, 0)):
            height, width = -(-height // 2), -(-width // 2)
        return height, width

    def grid(self, image: Size) -> Size:
        """Height and width of the last feature map for an image size."""
        if image[0] < 1 or image[1] < 1:
            raise UserError(f"an image of {image[0]}x{image[1]} pixels is empty: make each side at least 1 pixel.")
        return self.stage_grid(image, 3)


@dataclass(frozen=True)
class ModuleConfig:
    """A user's own `nn.Module`, which vitral can train and evaluate but not build: images in, logits out."""

    name: str
    image: Size
    channels: int
    classes: int

    def __post_init__(self) -> None:
        check_fields(self)
        _check_positive(self, "channels", "classes")
        if min(self.image) < 1:
            raise UserError(f"an image of {self.image[0]}x{self.image[1]} pixels is empty: set image=(height, width).")


ModelConfig = ViTConfig | ResNetConfig  # what vitral can build
Architecture = ModelConfig | ModuleConfig

_FAMILIES: dict[str, type[Architecture]] = {"vit": ViTConfig, "resnet": ResNetConfig, "module": ModuleConfig}


def as_dict(architecture: Architecture) -> dict[str, Any]:
    """A description that fits into JSON; `from_dict` is the inverse."""
    family = next(name for name, config in _FAMILIES.items() if type(architecture) is config)
    return {"family": family, **asdict(architecture)}


def from_dict(description: Mapping[str, Any]) -> Architecture:
    """The architecture that `as_dict` described; raises UserError for anything else, as an unknown key would change
    what the weights compute."""
    if not isinstance(description, Mapping):
        raise UserError("the architecture is not an object of names and values: the file is damaged.")
    values = dict(description)
    family = values.pop("family", None)
    if not isinstance(family, str) or family not in _FAMILIES:
        raise UserError(f'unknown model family "{shorten(family)}": update vitral if a newer version wrote this file.')
    for key in ("image", "blocks"):
        if isinstance(values.get(key), list):
            values[key] = tuple(values[key])
    if isinstance(stem := values.get("stem"), Mapping):
        blocks = stem.get("blocks")
        values["stem"] = _built(StemConfig, {**stem, "blocks": tuple(blocks) if isinstance(blocks, list) else blocks})
    if isinstance(values.get("rope"), Mapping):
        values["rope"] = rope_from_dict(values["rope"])
    return _built(_FAMILIES[family], values)


def rope_from_dict(description: Mapping[str, Any]) -> RopeConfig:
    """The inverse of `asdict`; its values may come from JSON."""
    values = dict(description)
    if isinstance(values.get("reference"), list):
        values["reference"] = tuple(values["reference"])
    return _built(RopeConfig, values)


def _built(config: type[Any], values: Mapping[str, Any]) -> Any:
    unknown = sorted(set(map(str, values)) - {field.name for field in fields(config)})
    if unknown:
        raise UserError(
            f"the architecture has unknown keys ({shorten(', '.join(unknown))}): update vitral to read this file."
        )
    try:
        return config(**values)
    except TypeError as error:
        raise UserError(f"the architecture is incomplete ({error}).") from error


def as_size(image: int | Size) -> Size:
    """224 -> (224, 224); (h, w), possibly as a list, stays. UserError for anything else."""
    size = tuple(image) if isinstance(image, list) else image
    check_value("image", size, int | Size)
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _check_depth(name: str, *counts: int) -> None:
    if max(counts, default=0) > _DEEPEST:
        raise UserError(f"{name} must be at most {_DEEPEST:,}, not {max(counts):,}.")


def _check_positive(config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise UserError(f"{name} must be at least 1, not {getattr(config, name)}.")

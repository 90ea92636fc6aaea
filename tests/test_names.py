"""Names to architectures and back, against the paper's own numbers."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vitral.architecture import ResNetConfig, StemConfig, ViTConfig
from vitral.errors import UserError
from vitral.names import NAMES, VIT_SIZES, name_of, parse

# depth, width, MLP, heads: Table 1 for B, L and H, section 4.3 for b, big_vision's table for the others.
DIMENSIONS = {
    "Ti": (12, 192, 768, 3),
    "S": (12, 384, 1536, 6),
    "M": (12, 512, 2048, 8),
    "b": (12, 384, 1536, 6),
    "B": (12, 768, 3072, 12),
    "L": (24, 1024, 4096, 16),
    "So400m": (27, 1152, 4304, 16),
    "H": (32, 1280, 5120, 16),
    "g": (40, 1408, 6144, 16),
    "g-opt": (40, 1536, 6144, 16),
    "G": (48, 1664, 8192, 16),
    "G-opt": (48, 1536, 8192, 16),
    "e": (56, 1792, 15360, 16),
}
UNITS = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}


def vit(name: str) -> ViTConfig:
    architecture = parse(name)
    assert isinstance(architecture, ViTConfig)
    return architecture


def resnet(name: str) -> ResNetConfig:
    architecture = parse(name)
    assert isinstance(architecture, ResNetConfig)
    return architecture


def message(name: str) -> str:
    """The sentence a name is refused with; it is one, and it ends."""
    with pytest.raises(UserError) as caught:
        parse(name)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


def test_every_size_is_covered() -> None:
    assert set(DIMENSIONS) == set(VIT_SIZES)


@pytest.mark.parametrize("size", DIMENSIONS)
@pytest.mark.parametrize("spelling", ["ViT-{}/{}", "{}/{}", "ViT-{}_{}", "{}_{}", " ViT-{}/{} "])
def test_sizes(size: str, spelling: str) -> None:
    for patch in (7, 16):
        found = vit(spelling.format(size, patch))
        assert (found.depth, found.width, found.mlp, found.heads) == DIMENSIONS[size]
        assert (found.patch, found.image, found.stem, found.axial) == (patch, (224, 224), None, False)
        assert (found.pool, found.position, found.classes, found.representation) == ("token", "1d", 1000, 0)


@pytest.mark.parametrize(
    ("name", "size", "blocks", "width", "patch", "grid"),
    [
        ("R50+ViT-B/16", "B", (3, 4, 9), 1, 1, (14, 14)),
        ("R50+ViT-L/16", "L", (3, 4, 9), 1, 1, (14, 14)),
        ("R50x1+ViT-L/16", "L", (3, 4, 9), 1, 1, (14, 14)),
        ("R50+ViT-B_16", "B", (3, 4, 9), 1, 1, (14, 14)),
        ("R50+B/16", "B", (3, 4, 9), 1, 1, (14, 14)),
        ("R50+ViT-B/32", "B", (3, 4, 6, 3), 1, 1, (7, 7)),
        ("R50+ViT-L/32", "L", (3, 4, 6, 3), 1, 1, (7, 7)),
        ("R50x2+ViT-B/32", "B", (3, 4, 6, 3), 2, 1, (7, 7)),
        ("R50+ViT-B/64", "B", (3, 4, 6, 3), 1, 2, (3, 3)),
        ("R26+ViT-S/32", "S", (2, 2, 2, 2), 1, 1, (7, 7)),
        ("R26+ViT-B/32", "B", (2, 2, 2, 2), 1, 1, (7, 7)),
        ("R101+ViT-B/16", "B", (3, 4, 26), 1, 1, (14, 14)),
        ("R+ViT-Ti/16", "Ti", (), 1, 8, (7, 7)),  # the root alone is at stride 4, whatever the name says
    ],
)
def test_hybrids(name: str, size: str, blocks: tuple[int, ...], width: int, patch: int, grid: tuple[int, int]) -> None:
    found = vit(name)
    assert (found.depth, found.width, found.mlp, found.heads) == DIMENSIONS[size]
    assert found.stem == StemConfig(blocks=blocks, width=width)
    assert (found.patch, found.grid((224, 224))) == (patch, grid)


@pytest.mark.parametrize("depth", UNITS)
@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("spelling", ["R{}x{}", "ResNet{}x{}"])
def test_resnets(depth: int, width: int, spelling: str) -> None:
    assert resnet(spelling.format(depth, width)) == ResNetConfig(blocks=UNITS[depth], width=width)


def test_a_resnet_is_one_wide_unless_it_says_so() -> None:
    assert resnet("R50") == resnet("ResNet50") == resnet("R50x1")


def test_axial_models() -> None:
    for patch in (16, 32):
        found = vit(f"Axial-ViT-B/{patch}")
        assert (found.depth, found.width, found.mlp, found.heads) == DIMENSIONS["B"]
        assert (found.patch, found.axial, found.prefix, found.pool) == (patch, True, 0, "mean")
    assert resnet("AxialResNet50") == ResNetConfig(blocks=UNITS[50], axial=True)


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("B/16@384", (384, 384)),
        ("B/16@384x512", (384, 512)),
        ("ViT-H/14@518", (518, 518)),
        ("R50+ViT-B/16@384", (384, 384)),
        ("R152x4@480", (480, 480)),
        ("AxialResNet50@96x64", (96, 64)),
        ("B/256", (256, 256)),  # 224 pixels would not hold one patch
    ],
)
def test_image_sizes(name: str, image: tuple[int, int]) -> None:
    assert parse(name).image == image


def test_changes_win_over_the_name() -> None:
    found = parse("B/16@384", classes=10, image=(32, 48))
    assert isinstance(found, ViTConfig)
    assert (found.classes, found.image, found.patch) == (10, (32, 48), 16)


@pytest.mark.parametrize("name", NAMES)
def test_listed_names_are_their_own_names(name: str) -> None:
    # Halving every dimension of B gives S, so the two small models share their architecture.
    assert name_of(parse(name)) == name.replace("ViT-b/", "ViT-S/")


@st.composite
def names(draw: st.DrawFn) -> str:
    """Every spelling of the grammar."""
    image = draw(st.sampled_from(["", "@{h}", "@{h}x{w}"])).format(h=draw(SIDES), w=draw(SIDES))
    wide = draw(st.sampled_from(["", "x1", "x2", "x4"]))
    depth = draw(st.sampled_from(sorted(UNITS)))
    if draw(st.booleans()):
        return draw(st.sampled_from(["R", "ResNet", "AxialResNet"])) + f"{depth}{wide}{image}"
    axial, word = draw(st.sampled_from(["", "Axial-"])), draw(st.sampled_from(["", "ViT-"]))
    stem, strides = draw(
        st.sampled_from(
            [
                ("", st.integers(1, 256)),
                (f"R{wide}+", st.integers(1, 40).map(lambda half: 2 * half)),
                (f"R{depth}{wide}+", st.sampled_from([16, 32, 64, 96])),
            ]
        )
    )
    size, slash = draw(st.sampled_from(sorted(VIT_SIZES))), draw(st.sampled_from("/_"))
    return f"{axial}{stem}{word}{size}{slash}{draw(strides)}{image}"


SIDES = st.integers(1, 600)


@given(names())
def test_a_name_and_back(name: str) -> None:
    try:
        architecture = parse(name)
    except UserError as error:
        assume("smaller than one patch" not in str(error))
        raise
    assert parse(name_of(architecture)) == architecture


@pytest.mark.parametrize(
    "changes",
    [{"depth": 5}, {"mlp": 100}, {"stem": StemConfig(blocks=(1, 1)), "patch": 4}],
)
def test_dimensions_without_a_name_are_spelt_out(changes: dict[str, Any]) -> None:
    name = name_of(parse("B/16", **changes))
    assert "(" in name
    message(name)


def test_a_name_does_not_claim_another_stem() -> None:
    """Two pixels of a stride-16 map are not the stride-32 model."""
    assert name_of(parse("R50+ViT-B/16", patch=2)) != "R50+ViT-B/32"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("vit-b16", "ViT-B/16"),
        ("ViT-B16", "ViT-B/16"),
        ("VIT-B/16", "ViT-B/16"),
        ("vit_b_16", "ViT-B/16"),
        ("vit-B/16@384", "ViT-B/16"),
        ("vit_base_patch16_224", "ViT-B/16"),
        ("google/vit-base-patch16-224-in21k", "ViT-B/16"),
        ("vit_large_patch32_384", "ViT-L/32"),
        ("google/vit-huge-patch14-224-in21k", "ViT-H/14"),
        ("B16", "ViT-B/16"),
        ("b32", "ViT-b/32"),
        ("B32", "ViT-B/32"),
        ("resnet50x1", "R50x1"),
        ("resnet50", "R50x1"),
        ("r152x4", "R152x4"),
        ("R50+VIT-B/16", "R50+ViT-B/16"),
        ("R50-ViT-B/16", "R50+ViT-B/16"),
        ("axial-vit-b/32", "Axial-ViT-B/32"),
        ("axial_resnet50", "AxialResNet50"),
    ],
)
def test_a_wrong_name_brings_the_obvious_one_first(wrong: str, meant: str) -> None:
    assert f'unknown model "{wrong}": did you mean {meant}, ' in message(wrong)


def test_a_lower_case_b_is_a_model_of_its_own() -> None:
    assert parse("b/16 ") == parse("ViT-b/16") != parse("ViT-B/16")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("", "did you mean"),
        ("hello", "did you mean"),
        ("B/-1", "did you mean"),
        ("B/16/2", "did you mean"),
        ("R50x0", "did you mean R50x1"),
        ("B/0", "patch size must be at least 1"),
        ("R+ViT-Ti/0", "patch size must be at least 1"),
        ("R+ViT-Ti/15", "even number"),
        ("R50+ViT-B/0", "16, 32 or a multiple of 32"),
        ("R50+ViT-B/17", "16, 32 or a multiple of 32"),
        ("R51+ViT-B/16", "use one of R26, R50, R101, R152, R200"),
        ("R50x0+ViT-B/16", "at least 1"),
        ("B/16@", "such as 384 or 384x512"),
        ("B/16@x", "such as 384 or 384x512"),
        ("B/16@384x", "such as 384 or 384x512"),
        ("B/16@384@2", "such as 384 or 384x512"),
        ("B/16@-384", "such as 384 or 384x512"),
        ("B/16@0", "at least 16 pixels"),
        ("B/16@8", "at least 16 pixels"),
        ("B/16@224x8", "at least 16 pixels"),
        ("R50x1@0", "empty"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(wrong: str, says: str) -> None:
    assert says in message(wrong)


@given(st.text(alphabet="VviTtBbRSL0126x@/_+- ", max_size=12))
def test_any_text_is_a_model_or_a_sentence(text: str) -> None:
    try:
        parse(text)
    except UserError:
        message(text)


@pytest.mark.parametrize(
    "field, says",
    [
        ("num_classes", "did you mean classes?"),
        ("img_size", "did you mean image?"),
        ("clases", "did you mean classes?"),
        ("pretrained", "read weights with vitral.load"),
        ("zzz", "use one of depth, width"),
    ],
)
def test_unknown_fields_name_the_one_that_is_meant(field: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        parse("ViT-B/16", **{field: 3})
    assert says in str(caught.value)


@pytest.mark.parametrize("field", [field.name for field in fields(ViTConfig)])
def test_a_value_of_another_type_names_what_is_expected(field: str) -> None:
    changes: dict[str, Any] = {field: object()}
    with pytest.raises(UserError, match=rf"^{field}(=| must be )") as caught:
        replace(parse("ViT-B/16"), **changes)
    assert "object" in str(caught.value)


def test_rotary_positions_are_described_by_their_class() -> None:
    with pytest.raises(UserError, match=r"^rope must be a vitral\.architecture\.RopeConfig, not True\.$"):
        parse("ViT-B/16", rope=True)


def test_only_a_text_is_a_name() -> None:
    name: Any = 3
    with pytest.raises(UserError, match=r"^int is not the name of a model: "):
        parse(name)


@pytest.mark.parametrize("image", [(224,), 224.5, "224", -1])
def test_an_image_size_is_one_number_or_two(image: Any) -> None:
    with pytest.raises(UserError, match=r"^image must be a whole number from 0 to .* or a height and a width, not "):
        parse("ViT-B/16", image=image)


@pytest.mark.parametrize("norm_eps", [0, -1e-6])
def test_the_epsilon_of_a_norm_is_above_0(norm_eps: float) -> None:
    with pytest.raises(UserError, match="norm_eps must be above 0"):
        parse("ViT-B/16", norm_eps=norm_eps)

"""Nearest neighbours: against scikit-learn and plain loops, across blocks, through a file, and patch by patch."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import ARCHITECTURES, SMALL, outside, pictures, randomised

from vitral.architecture import Architecture
from vitral.data import neighbours
from vitral.errors import UserError
from vitral.inspection.representations import (
    FeatureIndex,
    index_images,
    index_patches,
    load_index,
    nearest_images,
    nearest_patches,
    patch_features,
    save_index,
)
from vitral.models.build import build


def names(count: int) -> list[str]:
    return [f"é {i}.png" for i in range(count)]


def made(architecture: Architecture) -> Any:
    """A model of random weights; Any, since kinds of models differ in what they hold."""
    return randomised(build(architecture))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "STORED_BLOCK", 7)
    monkeypatch.setattr(neighbours, "QUERY_BLOCK", 3)


@pytest.mark.usefixtures("small_blocks")
def test_neighbours_equal_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    features, queries = rng.normal(size=(50, 12)) * rng.uniform(0.1, 9, (50, 1)), rng.normal(size=(8, 12))
    oracle = outside("sklearn.neighbors").NearestNeighbors(n_neighbors=10, metric="cosine", algorithm="brute")
    distances, expected = oracle.fit(features).kneighbors(queries)
    scores, indices = nearest_images(index_images(names(50), features), queries, 10)
    assert (scores.dtype, indices.dtype) == (np.float32, np.int64)
    assert indices.tolist() == expected.tolist()
    np.testing.assert_allclose(scores, 1 - distances, atol=1e-6)


@given(
    n=st.integers(0, 30), q=st.integers(0, 7), k=st.integers(1, 35), rows=st.integers(1, 9), seed=st.integers(0, 1000)
)
@settings(max_examples=60)
def test_equal_scores_are_in_index_order_for_any_block_size(n: int, q: int, k: int, rows: int, seed: int) -> None:
    """Vectors along few axes, so that most scores are equal and exact."""
    rng = np.random.default_rng(seed)
    features, queries = np.eye(3)[rng.integers(0, 3, n)], rng.integers(0, 3, (q, 3)) * np.eye(3)[rng.integers(0, 3, q)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "STORED_BLOCK", rows)
        patch.setattr(neighbours, "QUERY_BLOCK", 2)
        scores, indices = nearest_images(index_images(names(n), features), queries, k)
    for query, result, where in zip(queries, scores, indices, strict=True):
        length = np.linalg.norm(query) or 1.0
        expected = sorted((-float(features[i] @ query / length), i) for i in range(n))[:k]
        assert list(zip((-result).tolist(), where.tolist(), strict=True)) == expected
    assert scores.shape == indices.shape == (q, min(k, n))


def test_a_zero_vector_has_similarity_zero():
    index = index_images(names(3), np.array([[0.0, 0.0], [3.0, 4.0], [-1.0, 0.0]]))
    scores, indices = nearest_images(index, np.array([[2.0, 0.0]]), 3)
    assert indices.tolist() == [[1, 0, 2]]
    assert scores[0].tolist() == pytest.approx([0.6, 0.0, -1.0])


def test_an_index_survives_saving_and_loading(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "new" / "pets.npz"
    for features in (rng.normal(size=(4, 5)), rng.normal(size=(4, 5)) * 7):
        index = index_images(names(4), features)
        save_index(path, index)
        back = load_index(path)
        assert back.paths == names(4)
        np.testing.assert_allclose(back.features, index.features, atol=1e-7)
    assert [file.name for file in path.parent.iterdir()] == ["pets.npz"]
    patches = FeatureIndex(names(2), rng.normal(size=(2, 3, 4, 5)).astype(np.float16))
    save_index(path, patches)
    assert load_index(path).features.dtype == np.float16
    assert np.array_equal(load_index(path).features, patches.features)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index.npz"
    save_index(path, index_images(names(2), np.eye(2)))
    before = path.read_bytes()

    def fail(stream: object, **_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="disk full"):
        save_index(path, index_images(names(2), -np.eye(2)))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["index.npz"]


def test_the_output_of_embed_is_an_index(tmp_path: Path) -> None:
    """`vitral embed` writes `paths` and features of any length."""
    features = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32) * 30
    np.savez(tmp_path / "e.npz", paths=np.array(names(5)), features=features)
    index = load_index(tmp_path / "e.npz")
    np.testing.assert_allclose(np.linalg.norm(index.features, axis=1), 1, atol=1e-6)
    assert nearest_images(index, features, 1)[1].ravel().tolist() == list(range(5))


@pytest.mark.parametrize("kind", ["absent", "text", "array", "other names", "objects", "torn"])
def test_other_files_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.npz"
    if kind == "text":
        path.write_text("hello")
    elif kind == "array":
        with path.open("wb") as stream:
            np.save(stream, np.eye(2))
    elif kind == "other names":
        np.savez(path, a=np.eye(2))
    elif kind == "objects":
        np.savez(path, paths=np.array([object()]), features=np.eye(1))
    elif kind == "torn":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("paths.npy", b"\x93NUMPY")
    with pytest.raises(UserError, match="is not an index of images"):
        load_index(path)


def test_mismatched_arguments_are_errors():
    index = index_images(names(3), np.eye(3))
    with pytest.raises(UserError, match="at least 1, not 0"):
        nearest_images(index, np.eye(3), 0)
    for queries in (np.eye(4), np.ones(3)):
        with pytest.raises(UserError, match="make them with the model that made the index"):
            nearest_images(index, queries, 1)
    with pytest.raises(UserError, match="are not finite"):
        nearest_images(index, np.full((1, 3), np.nan), 1)
    with pytest.raises(UserError, match="2 paths do not fit 3 features"):
        index_images(names(2), np.eye(3))
    with pytest.raises(UserError, match="are not finite"):
        index_images(names(1), np.array([[np.inf, 0]]))
    with pytest.raises(UserError, match="contains whole images"):
        nearest_patches(index, np.ones(3), 1)
    patches = FeatureIndex(names(1), np.ones((1, 2, 2, 3), np.float16))
    with pytest.raises(UserError, match="contains patches"):
        nearest_images(patches, np.eye(3), 1)
    with pytest.raises(UserError, match="one vector per image"):
        index_images(names(1), patches.features)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", ["DINOv2 with registers", "BiT"])
def test_patch_neighbours_equal_those_of_a_loop(name: str) -> None:
    model = made(ARCHITECTURES[name])
    images = pictures(5, 3, 96, 64)
    index = index_patches(model, zip([names(5)[i : i + 2] for i in (0, 2, 4)], images.split(2), strict=True), 5)
    assert index.features.dtype == np.float16
    features = patch_features(model, images).double().numpy()
    features /= np.linalg.norm(features, axis=-1, keepdims=True)
    np.testing.assert_allclose(index.features, features, atol=5e-4)
    query = features[3, 1, 0]
    loop = [
        (float(features[i, y, x] @ query), (i, y, x))
        for i in range(5)
        for y in range(features.shape[1])
        for x in range(features.shape[2])
    ]
    for skip in (None, 3):
        expected = dict((place, score) for score, place in sorted(loop, reverse=True) if place[0] != skip)
        result = nearest_patches(index, index.features[3, 1, 0], 6, skip=skip)
        assert len(result) == 6
        best = list(expected.values())[:6]
        assert [match.score for match in result] == pytest.approx(best, abs=2e-3)
        for match in result:
            assert expected[match[:3]] == pytest.approx(match.score, abs=2e-3)
    assert nearest_patches(index, index.features[3, 1, 0], 1)[0][:3] == (3, 1, 0)


def test_a_copied_patch_is_found():
    """The same pixels at another place of another image, in a model that knows no positions and does not mix tokens."""
    model: Any = build(SMALL)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.out.weight.zero_()
        for position in model.positions:
            position.table.zero_()
    images = pictures(4, 3, 32, 48)
    images[2, :, 24:32, 40:48] = images[0, :, 8:16, 0:8]
    index = index_patches(model.eval(), [(names(4), images)], 4)
    best = nearest_patches(index, index.features[0, 1, 0], 2, skip=0)
    assert best[0][:3] == (2, 3, 5)
    assert best[0].score == pytest.approx(1, abs=1e-3)
    assert best[1].score < 0.95


def test_images_of_two_sizes_are_an_error():
    model = made(SMALL)
    wide, small = pictures(1, 3, 32, 40), pictures(2, 3, 32, 32)
    for batches, most in (
        ([(names(2), small), (names(1), wide)], 3),
        ([(names(1), small)], 2),
        ([(names(3), small)], 3),
        ([(names(2), small)], 1),
    ):
        with pytest.raises(UserError, match="of one size, with a path for each"):
            index_patches(model, batches, most)


def test_a_patch_index_is_cut_to_the_number_of_images():
    model, images = made(SMALL), pictures(3, 3, 32, 32)
    index = index_patches(model, [(names(2), images[:2]), (["last"], images[2:])], 9)
    assert index.paths == [*names(2), "last"]
    assert index.features.shape == (3, 4, 4, 32)
    assert index_patches(model, [], 9).paths == []

"""Block sizes fit the shared memory of every card, and a block of queries meets exactly the keys that it sees."""

import ctypes

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attnlab import device
from attnlab.attention import visible
from attnlab.flash import tiles
from attnlab.flash.tiles import Band, Tile
from attnlab.inputs import qkv

KIB = 2**10


def card(capability):
    return device.Device("a card", "gpu", capability)


def bytes_of(tile: Tile, H: int, itemsize: int, backward: bool) -> int:
    """What the kernels hold at once, counted anew: q, and k and v a stage; or the worse of the two backward kernels."""
    if not backward:
        return (tile.q * H + tile.stages * (tile.k * H + tile.k * H)) * itemsize
    dq = 2 * tile.q * H + tile.stages * 2 * tile.k * H  # q and dout stay, k and v pass
    dkv = 2 * tile.k * H + tile.stages * 2 * tile.q * H  # k and v stay, q and dout pass
    return max(dq, dkv) * itemsize


# ---- block sizes -------------------------------------------------------------------------------------------


L4 = {  # head dim, causal, backward: the block, and KiB counted by hand
    (64, False, False): ((256, 64), 80),  # 128 bytes a row of (256 + 3·2·64)
    (64, True, False): ((128, 64), 48),  # (128 + 2·2·64)
    (64, False, True): ((64, 64), 48),  # 2·(64 + 2·64)
    (64, True, True): ((64, 64), 48),
    (128, False, False): ((128, 64), 96),
    (128, True, False): ((128, 64), 96),
    (128, False, True): ((64, 64), 96),
    (128, True, True): ((64, 64), 96),
}


@pytest.mark.parametrize("H, is_causal, backward", L4)
def test_the_l4_gets_a_block_that_fits_into_its_99_kib(H, is_causal, backward):
    shared = tiles.shared_memory(card((8, 9)))
    assert shared == 99 * KIB
    tile = tiles.choose(H, 2, shared, is_causal=is_causal, backward=backward)
    used = bytes_of(tile, H, 2, backward)
    assert ((tile.q, tile.k), used / KIB) == L4[H, is_causal, backward] and used <= shared


@pytest.mark.parametrize("capability", tiles.SHARED_KIB, ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_every_known_card_has_a_block_for_every_head_dim_and_dtype(capability, backward):
    shared = tiles.shared_memory(card(capability))
    assert shared == tiles.SHARED_KIB[capability] * KIB
    for H in (16, 32, 64, 128):
        for itemsize in (2, 4):
            for is_causal in (False, True):
                tile = tiles.choose(H, itemsize, shared, is_causal=is_causal, backward=backward)
                used = tile.backward_bytes(H, itemsize) if backward else tile.forward_bytes(H, itemsize)
                assert used == bytes_of(tile, H, itemsize, backward) <= shared
                assert all(n >= 16 and n & (n - 1) == 0 for n in (tile.q, tile.k)), "powers of two, 16 or more"
                assert tile.warps in (4, 8) and tile.stages >= 1


def test_a_hopper_gets_a_larger_block_than_an_ada():
    hopper, ada = (tiles.choose(128, 2, tiles.shared_memory(card(c))) for c in ((9, 0), (8, 9)))
    assert hopper.q * hopper.k > ada.q * ada.k
    assert hopper.forward_bytes(128, 2) > 99 * KIB


def test_an_unknown_device_and_a_cpu_get_a_small_block():
    assert tiles.shared_memory(card((7, 0))) is None is tiles.shared_memory(device.Device("a CPU", "cpu"))
    tile = tiles.choose(128, 2, None, is_causal=True)
    assert tile == tiles.choose(128, 2, None, backward=True) and tile.forward_bytes(128, 2) <= 48 * KIB


def test_where_no_block_fits_the_refusal_says_what_was_asked_and_what_to_do():
    with pytest.raises(ValueError, match="head dim 128 with 4 bytes.* 1,024 bytes of shared memory: use a smaller"):
        tiles.choose(128, 4, 1024)
    smallest = min(tiles.FULL, key=lambda tile: tile.forward_bytes(16, 2))
    assert tiles.choose(16, 2, smallest.forward_bytes(16, 2)) == smallest
    with pytest.raises(ValueError, match="no block"):
        tiles.choose(16, 2, smallest.forward_bytes(16, 2) - 1)


@given(st.integers(1, 300), st.integers(1, 300), *2 * [st.sampled_from([16, 32, 64, 128, 256])])
@settings(deadline=None, derandomize=True)
def test_a_clipped_block_is_no_larger_than_the_length_needs(T, S, q, k):
    tile = tiles.clip(Tile(q, k, 8, 3), T, S)
    assert (tile.warps, tile.stages) == (8, 3)
    for got, block, length in ((tile.q, q, T), (tile.k, k, S)):
        assert got == 16 or (16 <= got <= block and got < 2 * length)
        assert got == block or got >= length, "made smaller only where one block holds everything"


def test_the_arrays_and_this_device_decide_the_tile():
    q, k, _ = qkv(1, 300, 2, 64, S=20, dtype="bfloat16")
    shared = tiles.shared_memory()
    for options in ({}, {"is_causal": True}, {"backward": True}):
        assert tiles.tile_for(q, k, **options) == tiles.clip(tiles.choose(64, 2, shared, **options), 300, 20)


def on_gpu() -> str:
    """Why the driver can't be asked here, or nothing."""
    try:
        here = device.current()
    except device.DeviceNotFound as e:
        return str(e)
    return "" if here.kind == "gpu" else f"no NVIDIA GPU: JAX computes on {here.name}"


WHY_NOT = on_gpu()


@pytest.mark.gpu
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "never")
def test_the_driver_says_the_same_of_this_card():
    cuda, value, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
    assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(handle), 0) == 0
    # 97 is CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN.
    assert cuda.cuDeviceGetAttribute(ctypes.byref(value), 97, handle) == 0
    assert tiles.shared_memory() == value.value


# ---- which blocks of keys ----------------------------------------------------------------------------------

LENGTHS = st.integers(1, 300)
SIDES = st.integers(-330, 330) | st.integers(-20, 60)
MASKS = st.fixed_dictionaries({"is_causal": st.booleans(), "local_window_size": st.none() | st.tuples(SIDES, SIDES)})
BLOCKS = st.sampled_from([16, 32, 64, 128])


def met(band: Band, rows: int, cols: int, T: int, length: int) -> np.ndarray:
    """(first, inner, outer, last) of every block of queries."""
    blocks = np.arange(-(-T // rows), dtype=np.int32)
    return np.stack(
        [np.broadcast_to(x, blocks.shape) for x in jax.vmap(lambda i: as_arrays(band, i, rows, cols, length))(blocks)],
        1,
    )


def as_arrays(band, i, rows, cols, length):
    return tuple(jax.numpy.asarray(x) for x in band.blocks(i, rows, cols, length))


def check_blocks(seen: np.ndarray, blocks: np.ndarray, rows: int, cols: int):
    """Against `seen` (T, S): nothing visible is skipped, nothing hidden is taken without a mask."""
    T, S = seen.shape
    for i, (first, inner, outer, last) in enumerate(blocks):
        assert 0 <= first <= inner and outer <= last <= -(-S // cols)
        mine = seen[i * rows : (i + 1) * rows]
        for j in range(-(-S // cols)):
            part = mine[:, j * cols : (j + 1) * cols]
            if inner <= j < outer:
                assert part.all() and part.shape[1] == cols, f"block {i}, {j} needs a mask"
            elif not (first <= j < inner or outer <= j < last):
                assert not part.any(), f"block {i}, {j} is skipped"
        taken = [*range(first, inner), *range(inner, outer), *range(outer, last)]
        assert len(taken) == len(set(taken)), "a block is met twice"


@settings(deadline=None, derandomize=True, max_examples=80)
@given(LENGTHS, LENGTHS, MASKS, BLOCKS, BLOCKS)
@example(100, 100, {"is_causal": True, "local_window_size": None}, 16, 64)
@example(100, 300, {"is_causal": False, "local_window_size": (-150, 200)}, 32, 16)
@example(300, 100, {"is_causal": False, "local_window_size": (40, -30)}, 16, 16)
def test_the_blocks_met_are_those_that_one_can_see(T, S, mask, rows, cols):
    band, seen = Band.of(T, S, **mask), visible(T, S, **mask)
    check_blocks(seen, met(band, rows, cols, T, S), rows, cols)
    check_blocks(seen.T, met(band.transposed, cols, rows, S, T), cols, rows)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(LENGTHS, LENGTHS, st.booleans(), st.none() | st.tuples(*2 * [st.integers(0, 200)]), BLOCKS, BLOCKS)
def test_no_block_is_met_in_vain_and_none_is_masked_in_vain(T, S, is_causal, window, rows, cols):
    mask = dict(is_causal=is_causal, local_window_size=window)
    # The kernel's last blocks reach beyond the end, where rows and keys are judged as if they went on.
    band = Band.of(T, S, **mask)
    row, col = np.arange(-(-T // rows) * rows)[:, None], np.arange(-(-S // cols) * cols)[None]
    seen = np.broadcast_to(True if band == Band() else band.sees(row, col), (row.size, col.size))
    for i, (first, inner, outer, last) in enumerate(met(band, rows, cols, T, S)):
        for j in (*range(first, inner), *range(outer, last)):
            part = seen[i * rows : (i + 1) * rows, j * cols : (j + 1) * cols]
            assert part.any(), f"block {i}, {j} is met in vain"
            assert not part.all() or (j + 1) * cols > S, f"block {i}, {j} needs no mask"


@settings(deadline=None, derandomize=True, max_examples=300)
@given(LENGTHS, LENGTHS, MASKS)
def test_a_band_sees_what_the_mask_shows_and_knows_its_blind_rows(T, S, mask):
    band, want = Band.of(T, S, **mask), visible(T, S, **mask)
    row, col = np.arange(T)[:, None], np.arange(S)[None]
    np.testing.assert_array_equal(np.broadcast_to(True if band == Band() else band.sees(row, col), want.shape), want)
    turned = band.transposed
    seen = True if turned == Band() else turned.sees(col.T, row.T)
    np.testing.assert_array_equal(np.broadcast_to(seen, want.T.shape), want.T)
    assert band.has_blind_rows(T, S) is bool((~want.any(axis=1)).any())


def test_a_side_that_cuts_nothing_off_is_dropped():
    assert Band.of(10, 20, local_window_size=(9, 19)) == Band() and Band().sees(0, 0) is None
    assert Band.of(10, 20, local_window_size=(8, 18)) == Band(8, 18)
    assert (
        Band.of(10, 20, is_causal=True) == Band(None, 0) == Band.of(10, 20, is_causal=True, local_window_size=(99, 5))
    )
    assert Band.of(10, 20, is_causal=True, local_window_size=(2, -3)) == Band(2, -3)

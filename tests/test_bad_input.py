"""Wrong input of every kind: one clear line that names the value and says what to do."""

import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import attnlab as lab
from attnlab import inputs, timing
from attnlab.features import feature
from attnlab.records import LOG, Records


def arrays(q=(2, 4, 4, 8), k=(2, 6, 2, 8), v=None, dtypes=("float32",) * 3):
    shapes = (q, k, v or k)
    return [np.zeros(shape, dtype) if dtype else shape for shape, dtype in zip(shapes, dtypes, strict=True)]


# what is wrong: (arrays, the error, words that its message holds)
WRONG_ARRAYS = {
    "q of rank 3": (arrays(q=(4, 4, 8)), ValueError, ["q", "rank 4", "(B, T, N, H)", "(4, 4, 8)"]),
    "k of rank 5": (arrays(k=(1, 2, 6, 2, 8)), ValueError, ["k", "(B, S, K, H)", "(1, 2, 6, 2, 8)"]),
    "v is a list": (arrays()[:2] + [[[1.0]]], ValueError, ["v", "list"]),
    "k and v differ": (arrays(v=(2, 7, 2, 8)), ValueError, ["(2, 6, 2, 8)", "(2, 7, 2, 8)", "same shape"]),
    "B differs": (arrays(q=(3, 4, 4, 8)), ValueError, ["B", "(3, 4, 4, 8)", "(2, 6, 2, 8)"]),
    "H differs": (arrays(q=(2, 4, 4, 16)), ValueError, ["H", "(2, 4, 4, 16)", "(2, 6, 2, 8)"]),
    "K does not divide N": (arrays(k=(2, 6, 3, 8)), ValueError, ["K must divide N", "4", "3"]),
    "more KV heads than heads": (arrays(k=(2, 6, 8, 8)), ValueError, ["K must divide N", "4", "8"]),
    "no query": (arrays(q=(2, 0, 4, 8)), ValueError, ["q", "empty", "(2, 0, 4, 8)", "at least 1"]),
    "no key": (arrays(k=(2, 0, 2, 8)), ValueError, ["k", "empty", "(2, 0, 2, 8)"]),
    "float64": (arrays(dtypes=("float64",) * 3), TypeError, ["float64", "bfloat16", "astype"]),
    "integers": (arrays(dtypes=("int32",) * 3), TypeError, ["int32", "float32", "astype"]),
    "booleans": (arrays(dtypes=("float32", "float32", "bool")), TypeError, ["bool", "astype"]),
    "mixed dtypes": (
        arrays(dtypes=("float32", "float16", "float16")), TypeError, ["one dtype", "float32", "float16"],
    ),
}  # fmt: skip

USERS = {
    "check_qkv": inputs.check_qkv,
    "naive_attention": lab.naive_attention,
    "reference": lab.reference,
    "relative_error": lambda q, k, v: lab.relative_error(q, q, k, v),
    "compare": lambda q, k, v: lab.compare({"naive": lab.naive_attention}, q, k, v, table="t"),
}


def says(error, words):
    """The message is one line of some length, and holds every word."""
    text = str(error.value)
    assert "\n" not in text.strip() and 20 < len(text) < 400
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in {text!r}"


@pytest.mark.parametrize("qkv, kind, words", WRONG_ARRAYS.values(), ids=WRONG_ARRAYS)
@pytest.mark.parametrize("use", USERS.values(), ids=USERS)
def test_wrong_arrays_are_refused_in_one_line_that_names_them(use, qkv, kind, words):
    with pytest.raises(kind) as error:
        use(*qkv)
    says(error, words)


WRONG_SIZES = {
    "no batch": (dict(B=0), ValueError, ["B must be at least 1", "0"]),
    "negative T": (dict(T=-3), ValueError, ["T must be at least 1", "-3"]),
    "zero S": (dict(S=0), ValueError, ["S must be at least 1", "0"]),
    "zero K": (dict(K=0), ValueError, ["K must be at least 1", "0"]),
    "half a head": (dict(N=2.5), TypeError, ["N must be a whole number", "2.5"]),
    "a whole float": (dict(H=64.0), TypeError, ["H must be a whole number", "64.0"]),
    "a word": (dict(T="128"), TypeError, ["T must be a whole number", "'128'"]),
    "K does not divide N": (dict(N=8, K=3), ValueError, ["K must divide N", "8", "3"]),
    "float64": (dict(dtype="float64"), TypeError, ["float64", "float32, bfloat16, float16"]),
    "int8": (dict(dtype=jnp.int8), TypeError, ["int8", "float32, bfloat16, float16"]),
    "no dtype at all": (dict(dtype="floaty"), TypeError, ["floaty", "float32, bfloat16, float16"]),
}


@pytest.mark.parametrize("sizes, kind, words", WRONG_SIZES.values(), ids=WRONG_SIZES)
def test_wrong_sizes_are_refused_by_name(sizes, kind, words):
    with pytest.raises(kind) as error:
        lab.qkv(**sizes)
    says(error, words)


def test_more_than_the_memory_is_refused_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(inputs._device, "free_memory", lambda: 3 * 2**30)
    with pytest.raises(MemoryError) as error:
        lab.qkv(64, 65536, 64, 128)
    says(error, ["B64 T65536 N64 H128", "768.0 GiB", "3.0 GiB", "lower B"])


def test_a_program_that_needs_more_than_the_memory_is_refused_before_it_runs(monkeypatch):
    q, k, v = lab.qkv(1, 64, 2, 16)
    monkeypatch.setattr(inputs._device, "free_memory", lambda: 1000)
    ran = []
    with pytest.raises(MemoryError) as error:
        timing.benchmark(lab.naive_attention, q, k, v, label="naive", check=ran.append)
    says(error, ["naive", "B1 T64 N2 H16", "lower B"])
    assert not ran


@pytest.mark.parametrize(
    "name, nearest",
    [("nave", "naive"), ("cudn", "cudnn"), ("cuDNN", "cudnn"), ("XLA", "xla"), ("zzz", None), (None, None), (3, None)],
    ids=repr,
)
def test_an_unknown_variant_is_named_with_the_nearest_known_one(name, nearest):
    with pytest.raises(ValueError) as error:
        lab.variant(name)
    says(error, [repr(name), "naive, xla, cudnn"])
    assert (f"did you mean {nearest!r}" in str(error.value)) if nearest else ("did you mean" not in str(error.value))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: feature("fp9_matmul"), ["fp9_matmul", "fp8_matmul", "cudnn_attention"]),
        (lambda: lab.claim("none_is_xlaa"), ["none_is_xlaa", "none_is_xla,"]),
        (lambda: lab.show_everything, ["show_everything", "show_table"]),
    ],
    ids=["feature", "claim", "name of the package"],
)
def test_unknown_names_are_answered_with_the_known_ones(call, words):
    with pytest.raises((KeyError, AttributeError, ValueError)) as error:
        call()
    assert all(word in str(error.value) for word in words)


def test_a_variant_that_is_wrong_or_raises_is_refused_in_its_row_and_the_others_are_timed():
    def tired(q, k, v):
        raise NotImplementedError("not on a Sunday\nand more lines")

    LOG.records = Records()
    variants = {"tired": tired, "wrong": lambda q, k, v: q, "naive": lab.naive_attention}
    rows = lab.compare(variants, *lab.qkv(1, 16, 2, 8), table="t", seconds=0.01)
    assert [type(r).__name__ for r in rows] == ["Finding", "Finding", "Timing"]
    assert rows[0].value == "NotImplementedError: not on a Sunday"
    assert "relative error" in rows[1].value and "0.002" in rows[1].value
    assert [(r.name, r.label, r.table, str(r.shape)) for r in rows[:2]] == [
        ("refused", "tired", "t", "B1 T16 N2 H8"), ("refused", "wrong", "t", "B1 T16 N2 H8"),
    ]  # fmt: skip
    assert rows[2].error < lab.TOLERANCE["float32"] and list(LOG.records) == list(rows)


def test_nan_output_is_refused_too():
    rows = lab.compare({"nan": lambda q, k, v: q * jnp.nan}, *lab.qkv(1, 16, 2, 8), table="t", seconds=0.01)
    assert rows[0].name == "refused" and "nan" in rows[0].value


def test_a_device_that_is_not_there_is_named_in_one_line():
    code = "import attnlab as lab; lab.start('00_start_here')"
    env = os.environ | {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=env,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0 and "DeviceNotFound" in last
    assert all(words in last for words in ("JAX_PLATFORMS='cuda'", "JAX_PLATFORMS=cpu", "make doctor"))
    assert not done.stdout


@pytest.mark.parametrize("value, fields", [(1, {"shape": (4, 128, 8, 64)}), ([1, 2], {}), (1 + 2j, {})], ids=str)
def test_a_finding_that_could_not_be_read_back_is_refused_where_it_is_made(value, fields):
    from attnlab import evidence, records

    before = len(records.log())
    with pytest.raises(TypeError, match="Shape|number, text"):
        evidence.observe("a", value, **fields)
    assert len(records.log()) == before


def test_a_slip_in_the_options_of_compare_is_the_callers():
    from attnlab.comparison import compare
    from attnlab.inputs import qkv

    with pytest.raises(TypeError, match="compare takes no foo"):
        compare({}, *qkv(1, 4, 1, 8), table="t", foo=1)

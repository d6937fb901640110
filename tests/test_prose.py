"""No figure stands in prose that nothing checks: a claim of the same notebook says it.

A figure is a number with a measured unit, or a factor, in digits or in words: 12 µs, 3.1×, 40%, three times faster,
half the memory. Sizes (T = 4096), dtypes, versions and minutes are none. That an output prints the same number backs
nothing: outputs print hundreds, so a round figure would be among them by chance. A range is backed by the same range.

README may quote any claim, whole, and say what stands in the table that it shows.
"""

import functools
import pathlib
import re

import nbformat
import pytest

from attnlab.ledger import LEDGER

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
README = ROOT / "README.md"
TEXTS = [*NOTEBOOKS, README]

# ---- what a figure is --------------------------------------------------------------------------------------

_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
WORDS = {word: float(n) for n, word in enumerate(_ONES.split())} | {
    "twenty": 20.0, "thirty": 30.0, "forty": 40.0, "fifty": 50.0, "hundred": 100.0, "thousand": 1000.0,
    "few": "few", "several": "few", "dozens of": "few", "hundreds of": "few",
}  # fmt: skip
FRACTIONS = {"half": 2, "halves": 2, "halved": 2, "third": 3, "quarter": 4, "fifth": 5, "tenth": 10, "hundredth": 100}
FACTORS = {"twice": 2.0, "thrice": 3.0, "double": 2.0, "doubles": 2.0, "doubled": 2.0, "triples": 3.0, "tripled": 3.0}
UNITS = {
    "%": "%|percent|per cent",
    "ns": "ns|nanoseconds?",
    "µs": "[µμu]s|microseconds?",
    "ms": "ms|milliseconds?",
    "s": "s|sec|seconds?",
    "×": r"[×x](?!\s?\d)|-?fold",  # no "4 × 4"
} | {u: u for u in "GFLOP/s TFLOP/s PFLOP/s MB/s GB/s TB/s KiB/s MiB/s GiB/s KB MB GB TB KiB MiB GiB TiB".split()}

WORD = rf"(?i:\b(?:(?:a|one|some) )?(?:{'|'.join(WORDS)}))"
DIGITS = r"(?<![\w.^])\d[\d,]*(?:\.\d+)?"
SPAN = rf"(?:(?:{DIGITS}|{WORD})\s?(?:to|or|and|–|-)\s?)?"  # "2 to" of "2 to 4 times"
MEASURED = (
    r"(?i:(?:time|memory|speed|work|cost|byte|traffic|error|rate|throughput|bandwidth|temporarie|peak|latency|"
    r"latencie)s?\b)"
)
COMPARED = (
    r"(?i:(?:as|the|its|their|that|what|of|more|less|fewer|faster|slower|quicker|larger|smaller|bigger|longer|shorter|"
    r"higher|lower|better|worse|cheaper)\b)"
)
SIZE = r"(?i:(?:its|their|the) (?:own )?size)"  # "32768 times their size" is a size, not a measurement
SHARE = rf"(?i:(?:{'|'.join(FRACTIONS)})s?)"
COUNT = r"(?i:\b(?:a|one|two|three|four|nine)[\s-])"

FIGURES = [
    *((rf"{SPAN}(?:{DIGITS}\s?|{WORD}[\s-])(?:{words})(?![\w/])", unit) for unit, words in UNITS.items()),
    (rf"{WORD}fold\b", "×"),
    (rf"{SPAN}(?:{DIGITS}|{WORD})[\s-]times\s(?!{SIZE}){COMPARED}", "×"),
    (rf"(?i:\bfactor of )(?:{DIGITS}|{WORD})", "×"),
    (r"(?i:\borders? of magnitude)", "×"),
    (rf"(?i:\b(?:{'|'.join(FACTORS)}))\s(?!{SIZE}){COMPARED}", "×"),
    (rf"(?:{COUNT}{SHARE}|(?i:\b(?:half|halves|halved|quarter)))\s(?:of\s)?(?:[^\s.:;]+\s){{0,3}}?{MEASURED}", "/"),
    (rf"(?:{COUNT}{SHARE}|(?i:\bhalf))\s(?i:as|less|more|fewer|faster|slower|again)\b", "/"),
    (rf"(?i:\bby\s)(?:{COUNT}{SHARE}|(?i:half))\b", "/"),
]


def _said(words: str, unit: str) -> frozenset:
    """What a figure says, in one form: "three times as", "3×" and "threefold" are all {(3.0, "×")}."""
    words = re.sub(r"\bone (?=hundred|thousand)", "", words.lower())
    if unit == "/":
        parts = next(n for word, n in FRACTIONS.items() if word in words)
        counted = next((WORDS[w] for w in re.split(r"[\s-]", words) if w in ("two", "three", "four", "nine")), 1.0)
        return frozenset({(counted / parts, "share")})
    if "magnitude" in words:
        return frozenset({(10.0, "×")})
    found = [float(n.replace(",", "")) for n in re.findall(DIGITS, words)]
    found += [n for word, n in WORDS.items() if re.search(rf"\b{word}(?:fold)?\b", words)]
    found += [n for word, n in FACTORS.items() if re.search(rf"\b{word}\b", words)]
    return frozenset((n, unit) for n in found)


def figures(text: str) -> dict[str, frozenset]:
    """The figures of a text, as they stand there, with what they say."""
    text = re.sub(r"\s+", " ", text)
    return {m[0].strip(): _said(m[0], unit) for pattern, unit in FIGURES for m in re.finditer(pattern, text)}


def prose(markdown: str) -> str:
    """What is read as sentences: no code, no formulas, no addresses."""
    text = re.sub(r"^```.*?^```$", "\n", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ {4,}\S.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "code", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def unbacked(markdown: str, known: set) -> list[str]:
    """The figures of `markdown` that are not among the `known` ones."""
    return [words for words, said in figures(prose(markdown)).items() if said not in known]


def known(text: str) -> set:
    """What each figure of a text says."""
    return set(figures(text).values())


# ---- the course --------------------------------------------------------------------------------------------


def claimed(notebook: str) -> set:
    """The figures in a notebook's claims, with what others say, which a claim answers."""
    return known("\n".join(f"{c.sentence}\n{c.others}" for c in LEDGER.values() if c.notebook == notebook))


def without_claims(text: str) -> str:
    """`text` without the claims that it quotes."""
    for c in LEDGER.values():
        text = re.sub(r"\s+".join(map(re.escape, c.sentence.split())), "", text)
    return text


@functools.cache
def markdown_and_known(path) -> tuple[str, set]:
    """The prose of README or a notebook, and the figures that it may say."""
    if path == README:
        text = README.read_text(encoding="utf-8")
        table = re.search(r"^<!-- saved: .* -->\n```\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
        return without_claims(text), known(table[1])
    cells = nbformat.read(path, as_version=4).cells
    return "\n\n".join(c.source for c in cells if c.cell_type == "markdown"), claimed(path.stem)


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.stem)
def test_no_figure_stands_in_prose_that_no_claim_says(path):
    found = unbacked(*markdown_and_known(path))
    assert not found, (
        f"{path.name}: {found}: give each a claim in attnlab.ledger (README: quote it whole), or take it out"
    )


# ---- the detector ------------------------------------------------------------------------------------------

# Numbers that no claim says, so that they can be planted anywhere.
PLANTED = [
    "cuDNN is 3.1791× faster.", "It is 3.1792x faster.", "It takes 12.7913 µs.", "It takes 12.7914us.",
    "about 9137.1 microseconds", "0.31791 ms a call", "a call of 9137.1 milliseconds", "13.7913 s",
    "a compilation of 9137.1 seconds", "It needs 47.913% less.", "47.914 percent less", "47.915 per cent less",
    "It reaches 913.71 TFLOP/s.", "39,171 GB/s of bandwidth", "913.71 MiB", "It saves 91.371 GiB.",
    "711 times as fast", "712 to 713 times less memory", "between 714 and 715 times as long", "716-fold",
    "by a factor of 717", "**3.1793×** faster", "(3.1794×)", "| cudnn | 12.7915 µs |", "718\ntimes as fast",
    "3.1795 ×, at every length", "3.1796× to 3.1797×",
]  # fmt: skip
WORDED = [
    "eleven times faster", "Eleven times faster it is.", "elevenfold", "a factor of eleven",
    "thirteen percent slower", "a few percent", "several times the time", "three to five times as fast",
    "a hundred times smaller", "twice as fast", "It is an order of magnitude faster.", "twice the memory",
    "It doubles the time.", "It halves the memory.", "a quarter of the time", "half the device time",
    "half of its memory", "A third of the memory", "half as fast", "three quarters of the published bandwidth",
    "two thirds of the work", "one fifth of the cost", "a third faster", "by half", "by a third",
    "fifty milliseconds", "two seconds",
]  # fmt: skip
ROUND = [
    "2× faster", "3× faster", "5× faster", "8× faster", "10× faster", "20 times less memory", "half the time",
    "a quarter of the memory", "5% slower", "10% less", "20% more", "30% slower", "50% of the peak", "90% of the peak",
    "10 µs", "20 µs", "100 µs", "1 ms", "10 ms", "100 TFLOP/s", "1 TB/s", "1 GiB", "16 GiB",
]  # fmt: skip
QUIET = [
    "T = 4096 and H = 64, in float64.", "About 20 minutes.", "| [00](x.ipynb) | 20 | say |", "10,000 scores",
    "compute capability 8.0 or newer", "JAX 0.11.2", "a (4, 128, 8, 64) array", "a T×S array", "O(T²)", "2^30 bytes",
    "`3.17× faster`", "    time = 12 µs", "```\n12 µs\n```", "[a link](https://x.org/12%20s)", "three kernels",
    "two bytes a weight", "the first time", "the third time", "ones and zeros", "a 4 × 4 block", "512 times their size",
    "Nearly half of the pairs are hidden.", "half precision", "call it 20 times", "eight-bit types", "FP8 at 128",
    "`XLA_PYTHON_CLIENT_MEM_FRACTION=.20` makes the share a fifth", "four traps", "10^9 bytes a second", "version 2.1",
]  # fmt: skip


@pytest.mark.parametrize("sentence", PLANTED + WORDED)
def test_a_figure_without_a_source_is_found(sentence):
    assert unbacked(f"Some words before. {sentence} And after.", set())


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.stem)
def test_a_planted_figure_is_found_round_ones_too_unless_a_claim_says_them(path):
    markdown, backed = markdown_and_known(path)
    unclaimed = [x for x in ROUND if not known(x) & claimed(path.stem)]
    assert len(unclaimed) > len(ROUND) / 2 and (path != README or unclaimed == ROUND)
    planted = {words for sentence in PLANTED + unclaimed for words in figures(prose(sentence))}
    found = unbacked(".\n\n".join([markdown, *PLANTED, *unclaimed]), backed)
    assert not planted - set(found)


def test_a_claim_is_quoted_whole_or_not_at_all():
    claim = next(c.sentence for c in LEDGER.values() if figures(c.sentence) and len(c.sentence.split()) > 8)
    words = claim.split()
    assert not unbacked(without_claims("\n".join(["So:", *words, "And on."])), set())
    assert unbacked(without_claims(" ".join(["So:", *words[:-1], "never."])), set())


@pytest.mark.parametrize("sentence", QUIET)
def test_what_is_no_measured_figure_is_left_alone(sentence):
    assert unbacked(f"Some words before.\n\n{sentence}\n\nAnd after.", set()) == []


@pytest.mark.parametrize(
    "sentence, source",
    [
        ("It is 3.1× faster.", "xla  3.1×  cudnn"),
        ("three times as long", "3×"),
        ("threefold", "three times the memory"),
        ("one hundred times smaller", "100×"),
        ("twice as fast", "takes 2.0× as long"),
        ("It takes 12 µs.", "naive  12 µs  cupti"),
        ("12.0 µs", "12 us"),
        ("half the device time", "less than half of the time"),
        ("three quarters of the memory", "three-quarters of the memory"),
        ('Is "2 to 4 times faster" true?', "Older material says: 2 to 4 times faster"),
    ],
)
def test_a_figure_that_a_claim_or_an_output_says_too_is_backed(sentence, source):
    assert figures(prose(sentence)) and unbacked(sentence, known(source)) == []


@pytest.mark.parametrize(
    "sentence, source",
    [
        ("3.1× faster", "3.2×"),
        ("12 µs", "12 ms"),
        ("2 to 4 times faster", "2 to 3 times faster"),
        ("2 times faster", "2 to 4 times faster"),
        ("2 to 4 times faster", "2 times faster, 4 times faster"),
        ("3%", "3×"),
    ],
)
def test_another_number_or_unit_backs_nothing(sentence, source):
    assert unbacked(sentence, known(source))

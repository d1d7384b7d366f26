"""What the model will see, for a person: `shardwise data show FILE [--model M]`.

Unlike `prepare` it does not stop at bad rows: it shows them beside everything else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import DataError
from shardwise.trainer.data.formats import ExampleReader, NumberedExample, RowProblem, TokenExample, example_text
from shardwise.trainer.data.options import DataOptions
from shardwise.trainer.data.packing import pack
from shardwise.trainer.data.sources import open_source
from shardwise.trainer.data.store import TokenizedSet, TokenizeReport, unknown_token
from shardwise.trainer.data.template import Renderer
from shardwise.trainer.data.tokenize import WholeLengths, prepare_with_lengths
from shardwise.vocabulary.units import format_percent

PERCENTILES = (0, 25, 50, 75, 90, 95, 99, 100)
_NUM_BUCKETS = 10
_BAR_WIDTH = 40
_NUM_SHOWN_DUPLICATES = 5
_MARK_COLOR, _PLAIN_COLOR = "\x1b[32m", "\x1b[0m"
_OPEN, _CLOSE = "⟦", "⟧"


@dataclass(frozen=True, kw_only=True)
class LengthDistribution:
    """How long the rows are."""

    unit: str
    """`tokens` (before truncation), or `characters` without a tokenizer."""
    percentiles: Mapping[str, int]
    """Percent -> length: `0` is the shortest, `100` the longest."""
    mean: float
    """Mean length."""
    buckets: tuple[tuple[int, int], ...]
    """Histogram: the largest length of a bucket, and the rows in it."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some text of a sample, all learned or all not."""

    text: str
    """As the tokenizer decodes it."""
    supervised: bool
    """Whether it is learned."""


@dataclass(frozen=True, kw_only=True)
class SamplePreview:
    """One sample as the model sees it."""

    row: int
    """Line or row number in the source."""
    num_tokens: int
    """Tokens after truncation; 0 without a tokenizer."""
    num_supervised_tokens: int
    """Tokens that are learned; 0 without a tokenizer."""
    pieces: tuple[Piece, ...]
    """Its text, in order."""


@dataclass(frozen=True, kw_only=True)
class DataPreview:
    """Everything that `data show` shows; `dataclasses.asdict` of it is JSON."""

    source: str
    """As the user wrote it."""
    form: str
    """The column form, and which columns are not read."""
    unit: str
    """What row numbers count: `line` or `row`."""
    num_rows: int
    """Rows that can be used."""
    num_bad_rows: int
    """Rows that cannot be used."""
    problems: tuple[str, ...]
    """The first bad rows, by number."""
    lengths: LengthDistribution
    """How long the rows are."""
    num_duplicates: int
    """Rows whose text equals an earlier row's, letter case and white space aside."""
    duplicates: tuple[tuple[int, int], ...]
    """The first of them: row number, number of the earlier row."""
    samples: tuple[SamplePreview, ...]
    """The first samples."""
    refusal: str | None = None
    """Why the set cannot be trained on as it is, in the words of the error that `prepare` raises."""
    tokenized: TokenizeReport | None = None
    """Truncation, supervision and notes; None without a tokenizer."""
    packing_efficiency: float | None = None
    """Share of packed rows of `max_length` tokens that is data, 0 to 1."""
    num_packed_rows: int | None = None
    """Packed rows of `max_length` tokens."""
    padding_efficiency: float | None = None
    """The same share if every sample were padded to the longest one."""


def preview(
    options: DataOptions, tokenizer: Any | None = None, num_samples: int = 2, *, vocab_size: int | None = None
) -> DataPreview:
    """Looks at a data set.

    Args:
        options: What to read and how; `skip_bad_rows` does not matter.
        tokenizer: A Hugging Face tokenizer; without one only the text is looked at.
        num_samples: Samples to show.
        vocab_size: Rows of the model's embedding; a token beyond them is marked, and refused.

    Raises:
        DataError: No usable row at all.
    """
    reader = ExampleReader(open_source(options), options)
    numbers: list[int] = []
    characters: list[int] = []
    first: list[NumberedExample] = []
    seen: dict[bytes, int] = {}
    duplicates: list[tuple[int, int]] = []
    for one in reader:
        text = example_text(one.example)
        numbers.append(one.number)
        characters.append(len(text))
        earlier = seen.setdefault(_digest(text), one.number)
        if earlier != one.number:
            duplicates.append((one.number, earlier))
        if len(first) < num_samples:
            first.append(one)
    if reader.form is None or not numbers:
        raise reader.problems.error()
    result = DataPreview(
        source=options.source,
        form=reader.form.describe(),
        unit=reader.source.unit,
        num_rows=len(numbers),
        num_bad_rows=reader.problems.num_rows,
        problems=reader.problems.lines(),
        lengths=distribution(np.array(characters, dtype=np.int64), "characters"),
        num_duplicates=len(duplicates),
        duplicates=tuple(duplicates[:_NUM_SHOWN_DUPLICATES]),
        samples=tuple(_plain_sample(one) for one in first),
    )
    if tokenizer is None:
        return result
    options = dataclasses.replace(options, skip_bad_rows=True)
    try:
        whole = prepare_with_lengths(options, tokenizer)
        return _with_tokens(result, whole, tokenizer, vocab_size)
    except DataError as error:  # nothing, or everything, is learned: the rendered text shows why
        renderer = Renderer(tokenizer, options)
        return dataclasses.replace(
            result, refusal=str(error), samples=tuple(_rendered_sample(one, renderer) for one in first)
        )


def _with_tokens(result: DataPreview, whole: WholeLengths, tokenizer: Any, vocab_size: int | None) -> DataPreview:
    tokenized = whole.tokenized
    report, lengths = tokenized.report, tokenized.lengths
    packing = pack(lengths, report.max_length)
    shown = range(min(len(result.samples), len(tokenized)))
    return dataclasses.replace(
        result,
        num_bad_rows=report.num_skipped_rows,
        lengths=distribution(whole.lengths, "tokens"),
        samples=tuple(sample_preview(tokenized, index, tokenizer, vocab_size) for index in shown),
        refusal=None if vocab_size is None else unknown_token(tokenized, result.source, vocab_size),
        tokenized=report,
        packing_efficiency=packing.efficiency,
        num_packed_rows=packing.num_rows,
        padding_efficiency=float(lengths.mean() / lengths.max()),
    )


def sample_preview(tokenized: TokenizedSet, index: int, tokenizer: Any, vocab_size: int | None = None) -> SamplePreview:
    """One sample of a set, decoded in runs of learned and not learned tokens; tokens beyond the vocabulary as such."""
    ids, marks = tokenized.sample(index)
    beyond = np.zeros(len(ids), bool) if vocab_size is None else ids >= vocab_size
    borders = [0, *(np.flatnonzero(np.diff(marks) | np.diff(beyond)) + 1).tolist(), len(ids)]
    pieces: list[Piece] = []
    for start, end in itertools.pairwise(borders):
        run: list[int] = ids[start:end].tolist()
        if beyond[start]:
            text = "".join(f"<token {token} is beyond the vocabulary>" for token in run)
        else:
            text = tokenizer.decode(run, skip_special_tokens=False)
        pieces.append(Piece(text=text, supervised=bool(marks[start])))
    return SamplePreview(
        row=int(tokenized.rows[index]),
        num_tokens=len(ids),
        num_supervised_tokens=int(marks.sum()),
        pieces=tuple(pieces),
    )


def distribution(lengths: NDArray[np.int64], unit: str) -> LengthDistribution:
    """Percentiles and histogram of at least one length: [rows]."""
    edges = np.unique(np.linspace(0, int(lengths.max()), _NUM_BUCKETS + 1).round().astype(np.int64))
    # A bucket holds lengths above the edge before it, up to its own.
    bucket = np.searchsorted(edges[1:], lengths, side="left")
    counts = np.bincount(bucket, minlength=len(edges) - 1)
    values = np.percentile(lengths, PERCENTILES, method="nearest")
    return LengthDistribution(
        unit=unit,
        percentiles={str(percent): int(value) for percent, value in zip(PERCENTILES, values, strict=True)},
        mean=float(lengths.mean()),
        buckets=tuple((int(edge), int(count)) for edge, count in zip(edges[1:], counts, strict=True)),
    )


def _digest(text: str) -> bytes:
    return hashlib.sha256(" ".join(text.casefold().split()).encode()).digest()[:16]


def _plain_sample(one: NumberedExample) -> SamplePreview:
    pieces = (Piece(text=example_text(one.example), supervised=False),)
    return SamplePreview(row=one.number, num_tokens=0, num_supervised_tokens=0, pieces=pieces)


def _rendered_sample(one: NumberedExample, renderer: Renderer) -> SamplePreview:
    """A sample as the template writes it, before it is tokenized."""
    if isinstance(one.example, TokenExample):
        return _plain_sample(one)
    try:
        rendered = renderer.render(one.example)
    except (RowProblem, DataError):  # the refusal says so
        return _plain_sample(one)
    borders = [0, *(border for span in rendered.spans for border in span), len(rendered.text)]
    pieces = tuple(
        Piece(text=rendered.text[start:end], supervised=index % 2 == 1)
        for index, (start, end) in enumerate(itertools.pairwise(borders))
        if start < end
    )
    return SamplePreview(row=one.number, num_tokens=0, num_supervised_tokens=0, pieces=pieces)


# ------------------------------------------------------------------------------------------------------- as text


def render_preview(found: DataPreview, *, color: bool = False) -> str:
    """The preview as text for a terminal; learned tokens stand in ⟦ ⟧, and in green with `color`."""
    lines = [f"{found.source}: {found.num_rows:,} rows, {found.form}"] if found.tokenized is None else []
    if found.num_bad_rows:
        lines.append(f"{found.num_bad_rows:,} rows cannot be used:")
        lines += [f"  {visible(problem)}" for problem in found.problems]
    if found.num_duplicates:
        pairs = ", ".join(f"{found.unit} {row} = {earlier}" for row, earlier in found.duplicates)
        lines.append(f"{found.num_duplicates:,} duplicates, letter case and white space aside: {pairs}")
    else:
        lines.append("no duplicates")
    if found.refusal is not None:
        lines += ["", f"cannot be trained on as it is: {visible(found.refusal)}"]
    lines += ["", *_length_lines(found.lengths)]
    if found.tokenized is not None:
        lines += ["", *_token_lines(found, found.tokenized)]
    for sample in found.samples:
        lines += ["", *_sample_lines(sample, found, color)]
    return "\n".join(lines) + "\n"


def _length_lines(lengths: LengthDistribution) -> list[str]:
    names = {"0": "shortest", "50": "median", "100": "longest"}
    values = ", ".join(f"{names.get(one, one + ' %')} {value:,}" for one, value in lengths.percentiles.items())
    lines = [f"length in {lengths.unit}: mean {lengths.mean:,.0f}, {values}"]
    most = max(count for _, count in lengths.buckets)
    width = len(f"{lengths.buckets[-1][0]:,}")
    for edge, count in lengths.buckets:
        bar = "█" * round(_BAR_WIDTH * count / most) or ("▏" if count else "")
        lines.append(f"  up to {edge:>{width},} {bar} {count:,}")
    return lines


def _token_lines(found: DataPreview, report: TokenizeReport) -> list[str]:
    lines = [visible(line) for line in report.describe()]
    if found.packing_efficiency is not None and found.padding_efficiency is not None:
        lines.append(
            f"packed into {found.num_packed_rows:,} rows of {report.max_length:,} tokens: "
            f"{format_percent(found.packing_efficiency, 1)} data; padded to the longest: "
            f"{format_percent(found.padding_efficiency, 1)}"
        )
    return lines


def _sample_lines(sample: SamplePreview, found: DataPreview, color: bool) -> Sequence[str]:
    counts = f", {sample.num_tokens:,} tokens, {sample.num_supervised_tokens:,} learned" if found.tokenized else ""
    on, off = (_MARK_COLOR, _PLAIN_COLOR) if color else ("", "")
    text = "".join(
        f"{on}{_OPEN}{visible(piece.text)}{_CLOSE}{off}" if piece.supervised else visible(piece.text)
        for piece in sample.pieces
    )
    return [f"--- {found.unit} {sample.row}{counts}", text]


def visible(text: str) -> str:
    """Text from a file, safe to print: control characters that could steer a terminal become pictures of themselves."""
    return "".join(
        chr(0x2400 + ord(one)) if ord(one) < 32 and one not in "\n\t" else "�" if 0x7F <= ord(one) < 0xA0 else one
        for one in text
    )
